"""How benchmarks publish what they found: tables, an HTML page, JSON, and how Ctrl-C ends them."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from io import StringIO
from math import floor
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

import diffray
from diffray.cluster.cli.bench.flags import Result

WIDTH = 140  # of tables that go to a file or a pipe
_INTERRUPTED = 130  # the exit status that shells give SIGINT


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile, interpolated between the two nearest values; of nothing, 0."""
    ordered = sorted(values)
    if len(ordered) < 2:
        return ordered[0] if ordered else 0.0
    place = (len(ordered) - 1) * percent / 100
    below = min(floor(place), len(ordered) - 2)
    return ordered[below] + (ordered[below + 1] - ordered[below]) * (place - below)


@dataclass
class Progress:
    """How many of the planned runs have finished, and whether Ctrl-C ended the rest."""

    planned: int
    done: int = 0
    interrupted: bool = False


@contextmanager
def interruptible(planned: int) -> Iterator[Progress]:
    """Let Ctrl-C end the block without a traceback, so that finished runs can be published."""
    progress = Progress(planned)
    try:
        yield progress
    except KeyboardInterrupt:
        progress.interrupted = True


def publish(
    progress: Progress,
    title: str,
    facts: dict[str, str],
    runs: Sequence[Mapping[str, Any]],
    tables: Sequence[Table],
    result: Result,
) -> None:
    """Print the tables and write the files; a benchmark that was interrupted then ends as such."""
    if progress.interrupted:
        facts = facts | {"interrupted": f"after {progress.done} of {progress.planned} runs"}
    if runs:
        screen = Console() if Console().is_terminal else Console(width=WIDTH)
        for table in tables:
            screen.print(table)
        if result.output_json is not None:
            found = {"facts": facts, "runs": runs}
            result.output_json.write_text(json.dumps(found, indent=1) + "\n")
        if result.report is not None:
            _write_html(result.report, title, facts, tables)
    if progress.interrupted:
        what = (
            f"after {progress.done} of {progress.planned} runs; results are those that had finished"
            if runs
            else "before anything had finished; there are no results"
        )
        typer.echo(f"diffray: interrupted {what}", err=True)
        raise typer.Exit(_INTERRUPTED)


def _write_html(path: Path, title: str, facts: dict[str, str], tables: Sequence[Table]) -> None:
    page = Console(record=True, file=StringIO(), width=WIDTH)
    about = Table("", "", title=f"diffray: {title}", show_header=False)
    for name, fact in facts.items():
        about.add_row(name, fact)
    for table in (about, *tables):
        page.print(table)
    page.save_html(str(path))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    made = Table(*head)
    for row in rows:
        made.add_row(*row)
    return made


def when_and_where() -> dict[str, str]:
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
