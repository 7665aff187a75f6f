"""`diffray doctor`: checks the machine, and on a GPU the kernels for a model."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from diffray.cluster.cli import flags
from diffray.cluster.control.engine_config import EngineConfig

if TYPE_CHECKING:
    from diffray.kernels.trial import Outcome
    from diffray.workers.bring_up.findings import Findings


def doctor(
    model: flags.Checkpoint = "demo",
    *,
    compute: flags.Compute,
    ranks: flags.Ranks,
    as_json: flags.Json = False,
) -> None:
    """Check this machine, and on a GPU the kernels for a model.

    The exit status is 1 if something must be fixed.
    """
    typer.echo("Checking this machine, which takes up to a minute ...", err=True)
    from diffray.cluster.cli.machine_checks import Check, machine_checks
    from diffray.components.mesh import Mesh
    from diffray.workers.bring_up.start import bring_up

    config = EngineConfig(**compute, **ranks)
    checks = []
    for check in machine_checks(model, config):
        checks.append(check)
        if not as_json:
            typer.echo(f"{check.name:<14}{check.found}")
    share = Mesh(0, config.tensor_parallel_size, config.expert_parallel)
    found = bring_up(model, config.rank_options, share, again=True)
    if found.failed:
        fix = f"Triton's kernels cannot be used ({found.failed}); --kernels torch skips them"
        checks.append(Check("kernels", "torch's only", fix))
    fixes = [check.fix for check in checks if check.fix]
    if as_json:
        typer.echo(json.dumps({"checks": [*map(asdict, checks)], **as_values(found)}, indent=2))
    else:
        ending = [f"To fix: {fix}." for fix in fixes] or ["Nothing to fix."]
        typer.echo("\n".join([*as_table(found), "", *ending]))
    if fixes:
        raise typer.Exit(1)


def rows(found: "Findings") -> Iterator[dict[str, Any]]:
    """Yield, for each kernel and size, the variant in use, with its time and torch's."""
    chosen = found.choices.chosen

    def place(outcome: "Outcome") -> tuple[str, Any]:
        return outcome.kernel, outcome.shape

    for (kernel, shape), several in groupby(sorted(found.outcomes, key=place), key=place):
        tried = {each.variant: each for each in several}
        used = tried.get(chosen.get((kernel, shape), ""))
        torch = tried.get("torch")
        yield {
            "kernel": kernel,
            "facts": list(shape.facts),
            "sizes": list(shape.sizes),
            "used": used and used.variant,
            "us": used and _microseconds(used.seconds),
            "launched_us": used and _microseconds(used.launched_s),
            "torch_us": torch and _microseconds(torch.seconds),
            "error": used and used.error,
            "tried": len(tried),
            "refused": sum(bool(each.refused) for each in tried.values()),
        }


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 1)


def as_values(found: "Findings") -> dict[str, Any]:
    """Return the findings about kernels in JSON's types."""
    return {
        "key": found.key,
        "kernels": [*rows(found)],
        "selection": found.selection,
        "graphs": found.graphs and asdict(found.graphs),
        "sums": found.sums and asdict(found.sums),
        "refused": [*found.lines()],
        "seconds": round(found.seconds, 1),
    }


def as_table(found: "Findings") -> list[str]:
    """Return the rows in columns, under the name of their kernel; nothing if there are none."""
    lines = [("  size", "used", "us", "torch us")]
    for kernel, sizes in groupby(rows(found), key=lambda row: row["kernel"]):
        lines.append((kernel, "", "", ""))
        for row in sizes:
            size = "  " + "x".join(map(str, row["sizes"]))
            lines.append((size, row["used"] or "none", _shown(row["us"]), _shown(row["torch_us"])))
    if len(lines) == 1:
        return []
    columns = [*zip(*lines, strict=True)]
    columns[0] = tuple(cell for cell in columns[0] if cell.startswith(" "))  # no headings
    widths = [max(map(len, column)) for column in columns]
    return ["", *("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
