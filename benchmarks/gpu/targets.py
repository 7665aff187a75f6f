"""The targets of the measurements, and whether they are met."""

from collections.abc import Sequence as Items
from typing import Any, Final, NamedTuple

Row = dict[str, Any]


class Target(NamedTuple):
    """A bound for a column of one row, or for its ratio to another row's."""

    program: str
    row: Row  # the columns by which the row is found
    column: str
    bound: float
    unit: str
    at_most: bool = False
    over: Row | None = None
    gpu: str = ""  # an absolute bound is for one card; empty: for any


_MOE: Final = {"shape": "llada-moe-7b-a1b", "rows": 1, "weights": "bfloat16"}
_STEP: Final = _MOE | {"part": "step", "window": 64, "context": 1024}
_ROUND: Final = _STEP | {"part": "engine", "decoder": "fixed", "cache": "dual"}
_TEXT: Final = _MOE | {"rate": 3.87, "decoder": "fixed", "cache": "dual", "graphs": True}
_FLOAT8: Final = {"weights": "float8"}
_H200: Final = "NVIDIA H200"

TARGETS: Final = (
    Target("step_time", _STEP, "share_of_floor", 0.85, "of the floor's speed"),
    Target("step_time", _STEP, "graph_ms", 3.9, "ms", at_most=True, gpu=_H200),
    Target("step_time", _STEP | {"weights": "int8"}, "per_s", 1.5, "times bfloat16", over=_STEP),
    Target("step_time", _STEP | _FLOAT8, "per_s", 1.5, "times bfloat16", over=_STEP),
    Target("step_time", _ROUND, "per_s", 0.9, "of the step's rate", over=_STEP),
    # Positions a second: 32 times as many in a step that takes up to 4 times as long.
    Target("step_time", _STEP | {"rows": 32}, "per_s", 0.25, "of batch 1's steps/s", over=_STEP),
    Target("generate", _TEXT, "share_of_floor", 0.75, "of the floor's speed"),
    # What dInfer reports for LLaDA-MoE without and with trajectory distillation.
    Target("generate", _TEXT, "tokens_per_s", 681, "tokens/s", gpu=_H200),
    Target("generate", _TEXT | {"rate": 5.67}, "tokens_per_s", 1126, "tokens/s", gpu=_H200),
    Target("generate", _TEXT | _FLOAT8, "tokens_per_s", 990, "tokens/s", gpu=_H200),
)


def verdicts(program: str, rows: Items[Row], gpu: str = "") -> list[str]:
    """Return a line for each measured target of a program: met or missed, with the value.

    Rows of chosen variants come before those of the defaults; only rows of the same are compared.
    """
    lines = []
    for target in TARGETS:
        row = _find(rows, target.row)
        other = None
        if row is not None and target.over is not None:
            alike = {name: row[name] for name in ("variants",) if name in row}
            other = _find(rows, target.over | alike)
        if target.program != program or row is None or (target.over and other is None):
            continue
        if target.gpu not in ("", gpu):
            continue
        value = row[target.column] / (1.0 if other is None else other[target.column])
        met = value <= target.bound if target.at_most else value >= target.bound
        lines.append(
            f"{'met' if met else 'missed'}: {value:.4g} of {'at most ' * target.at_most}"
            f"{target.bound:g} {target.unit} ({row['case']})"
        )
    return lines


def _find(rows: Items[Row], columns: Row) -> Row | None:
    """Return the first row with these columns."""
    return next((row for row in rows if columns.items() <= row.items()), None)
