"""`diffray doctor`: checks the machine, and on a GPU the kernels for a model."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from diffray.cluster.cli.failures import one_sentence
from diffray.cluster.cli.flag_records import Flag, Options, spread
from diffray.cluster.cli.flags import CHECKPOINT, Json
from diffray.cluster.control.engine_config import EngineConfig

if TYPE_CHECKING:
    from diffray.cluster.cli.machine_checks import Check
    from diffray.kernels.trial import Outcome
    from diffray.workers.findings import Findings


class Served(Options):
    """What the model would be served with, as far as kernels and memory depend on it."""

    model = EngineConfig
    panel = "Model"
    flags: ClassVar = {
        "dtype": Flag(),
        "device": Flag(),
        "kernels": Flag(),
        "quantization": Flag(("--quantization", "-q")),
        "cuda_graphs": Flag(),
        "bring_up": Flag(),
        "tensor_parallel_size": Flag(("--tensor-parallel-size", "--tp", "--tp-size", "-tp")),
        "expert_parallel": Flag(("--enable-expert-parallel", "--ep")),
    }


@spread
def doctor(
    model: Annotated[str, typer.Argument(help=CHECKPOINT)] = "demo",
    *,
    served: Served,
    as_json: Json = False,
) -> None:
    """Check this machine, and on a GPU the kernels for a model.

    Ends with status 1 if something must be mended.
    """
    with one_sentence():
        from diffray.cluster.cli.machine_checks import machine_checks
        from diffray.workers.bring_up import bring_up
        from diffray.workers.engine_options import EngineOptions

        config = EngineConfig(**served.typed())
        checks = machine_checks(model, config)
        if not as_json:
            typer.echo("\n".join(as_lines(checks)))
        found = bring_up(
            model,
            EngineOptions(**config.setup()),
            ranks=config.tensor_parallel_size,
            expert_parallel=config.expert_parallel,
            again=True,
        )
    mend = [each.mend for each in checks if each.mend]
    if as_json:
        typer.echo(json.dumps({"checks": [*map(asdict, checks)], **as_values(found)}, indent=2))
    else:
        typer.echo("\n".join([*as_table(rows(found)), *conclusion(mend)]))
    if mend or found.failed:
        raise typer.Exit(1)


def as_lines(checks: Iterable["Check"]) -> list[str]:
    """Return a line for each check: its name, and what was found."""
    return [f"{each.name:<14} {each.found}" for each in checks]


def conclusion(mend: list[str]) -> list[str]:
    """Return a line for each thing to mend, or one that there is none."""
    return ["", *(f"To mend: {each}." for each in mend)] if mend else ["", "Nothing to mend."]


def rows(found: "Findings") -> Iterator[dict[str, Any]]:
    """Yield for each kernel and size what is used, and how long it and torch's form take."""
    chosen = found.choices.chosen

    def place(outcome: "Outcome") -> tuple[str, Any]:
        return outcome.kernel, outcome.shape

    for (kernel, shape), several in groupby(sorted(found.outcomes, key=place), key=place):
        tried = {each.variant: each for each in several}
        name = chosen.get((kernel, shape))
        used = tried[name] if name is not None else None
        yield {
            "kernel": kernel,
            "facts": list(shape.facts),
            "sizes": list(shape.sizes),
            "used": name,
            "us": _microseconds(used),
            "launched_us": _microseconds(used, launched=True),
            "torch_us": _microseconds(tried.get("torch")),
            "error": used.error if used is not None else None,
            "tried": len(tried),
            "refused": sum(bool(each.refused) for each in tried.values()),
        }


def _microseconds(outcome: "Outcome | None", *, launched: bool = False) -> float | None:
    if outcome is None:
        return None
    seconds = outcome.launched_s if launched else outcome.seconds
    return None if seconds is None else round(seconds * 1e6, 1)


def as_values(found: "Findings") -> dict[str, Any]:
    """Return what was found about kernels in JSON's types."""
    graphs = None if found.graphs is None else asdict(found.graphs)
    return {
        "key": found.key,
        "kernels": [*rows(found)],
        "graphs": graphs,
        "refused": [*found.lines()],
        "seconds": round(found.seconds, 1),
    }


def as_table(found: Iterable[dict[str, Any]]) -> list[str]:
    """Return the rows in columns, after an empty line; nothing if there are none."""
    table = [("kernel", "size", "used", "us", "launched", "torch", "tried", "refused")]
    for row in found:
        sizes = "x".join(map(str, row["sizes"]))
        times = (_shown(row[name]) for name in ("us", "launched_us", "torch_us"))
        counts = str(row["tried"]), str(row["refused"])
        table.append((row["kernel"], sizes, row["used"] or "nothing", *times, *counts))
    if len(table) == 1:
        return []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["", *("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
