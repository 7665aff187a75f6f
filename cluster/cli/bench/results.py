"""Publishes benchmark results as tables, JSON and HTML; after Ctrl-C, those of finished runs."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import StringIO
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import diffray
from diffray.cluster.cli.flag_records import flag, record

if TYPE_CHECKING:  # not for help
    from rich.table import Table

Run = dict[str, Any]  # a run's numbers, by their names in JSON

WIDTH = 140  # of tables that go to a file or a pipe
_INTERRUPTED = 130  # the exit status by which shells report SIGINT


@record("Result")
class Result:
    output_json: Path | None = flag(metavar="OUT.json", help="Write the results to this file.")
    report: Path | None = flag(metavar="OUT.html", help="Write the tables to this file, as HTML.")

    def check(self) -> None:
        """Refuse files that cannot be written, before spending hours on their content."""
        for name, path in (("--output-json", self.output_json), ("--report", self.report)):
            if path is not None and path.is_dir():
                raise ValueError(f"{name} {path} is a folder; name a file in it")
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{name} {path}: there is no folder {path.parent}; make it first")


@dataclass(slots=True)
class Report:
    """The finished runs, how many were planned, and the facts that all share."""

    facts: dict[str, str]
    planned: int = 0
    runs: list[Run] = field(default_factory=list)


def table(columns: Mapping[str, str], runs: Sequence[Run]) -> "Table":
    """Return a row for each run, formatted as each column says; - where a run has no value."""
    from rich.table import Table

    made = Table(*columns)
    for run in runs:
        made.add_row(*(_cell(form, run) for form in columns.values()))
    return made


def _cell(form: str, run: Run) -> str:
    try:
        return form.format(**run)
    except (KeyError, TypeError):
        return "-"


@contextmanager
def published(
    title: str, result: Result, tables: "Callable[[list[Run]], list[Table]]"
) -> Iterator[Report]:
    """Publish the runs that the block adds to its report."""
    from rich.console import Console

    report = Report(_when_and_where())
    result.check()
    interrupted = False
    try:
        yield report
    except KeyboardInterrupt:
        interrupted = True
    so_far = f"after {len(report.runs)} of {report.planned} runs"
    if interrupted:
        report.facts["interrupted"] = so_far
    if report.runs:
        if result.output_json is not None:
            found = {"facts": report.facts, "runs": report.runs}
            result.output_json.write_text(json.dumps(found, indent=1) + "\n")
        made = tables(report.runs)
        screen = Console() if Console().is_terminal else Console(width=WIDTH)
        for each in made:
            screen.print(each)
        if result.report is not None:
            _write_html(result.report, title, report.facts, made)
    if interrupted:
        what = (
            f"{so_far}; the results are those of the finished runs"
            if report.runs
            else "before any run finished; there are no results"
        )
        typer.echo(f"diffray: interrupted {what}", err=True)
        raise typer.Exit(_INTERRUPTED)


def _write_html(path: Path, title: str, facts: dict[str, str], tables: "list[Table]") -> None:
    from rich.console import Console
    from rich.table import Table

    page = Console(record=True, file=StringIO(), width=WIDTH)
    about = Table("", "", title=f"diffray: {title}", show_header=False)
    for fact in facts.items():
        about.add_row(*fact)
    for each in (about, *tables):
        page.print(each)
    page.save_html(str(path))


def _when_and_where() -> dict[str, str]:
    """Return the date, the machine, and the command line without the program's own path."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    load = f"{os.getloadavg()[0]:.1f}"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["diffray", *sys.argv[1:]]),
        "diffray": diffray.__version__,
        "machine": f"{next(names, platform.machine())}, {os.cpu_count()} cores, "
        f"load {load} at the start",
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile, interpolated between the two nearest values; 0 for none."""
    ordered = sorted(values)
    if len(ordered) < 2:
        return ordered[0] if ordered else 0.0
    place = (len(ordered) - 1) * percent / 100
    below = min(floor(place), len(ordered) - 2)
    return ordered[below] + (ordered[below + 1] - ordered[below]) * (place - below)
