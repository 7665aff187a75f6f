"""Find out which variants of the kernels to run, as the first start of a model does on a GPU.

    python -m benchmarks.gpu.bring_up --shape llada-moe-7b-a1b --choices choices
    python -m benchmarks.gpu.step_time --choices choices

The other programs measure the chosen variants, and the default ones beside them. Each model takes
less than a minute unless there is a `--budget`; variants for which there is no time are not tried.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.gpu import choices
from benchmarks.gpu.program import Row, arguments, run
from benchmarks.gpu.random_model import WEIGHTS, config_of, quantization_of
from benchmarks.gpu.shapes import ALL, SHAPES
from diffray.workers.bring_up.one_layer import Sizes, Step
from diffray.workers.bring_up.trial_process import TrialPlan
from diffray.workers.bring_up.trials import TimeLimits, run_trials

TABLE = "diffray.kernels.triton.table"
_LENGTH = 4096  # of the longest context


def main() -> None:
    parser = arguments("Find out which variants of the kernels to run.")
    parser.add_argument("--shape", choices=ALL, nargs="+", default=[*SHAPES])
    parser.add_argument("--weights", choices=WEIGHTS, nargs="+", default=["bfloat16"])
    parser.add_argument("--budget", type=float, help="seconds for all variants but the defaults")
    parser.add_argument("--rows", type=int, nargs="+", help="default: the steps that engines run")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    run(plan, parser.parse_args(), _line)


def plan(args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """Return a bring-up for each model and kind of weights."""
    found: dict[str, Callable[[], Row]] = {}
    sizes = [(rows, args.window, args.context) for rows in args.rows or ()]
    if sizes:  # also a whole canvas, which a text's steps run between blocks
        sizes.append((1, args.context + 2 * args.window, args.context + 2 * args.window))
    for shape, weights in product(args.shape, args.weights):
        row: Row = {"shape": shape, "weights": weights, "steps": sizes, "budget": args.budget}
        found[f"{shape} {weights}"] = partial(tried, row, args.choices)
    return found


def tried(
    row: Row,
    folder: Path | None,
    device: str = "cuda",
    dtype: str = "bfloat16",
    table: str = TABLE,
) -> Row:
    """Try all variants for a model, and write the outcomes to the folder, if given."""
    shape, weights = row["shape"], row["weights"]
    sizes = Sizes(
        config=config_of(ALL[shape], _LENGTH),
        dtype=dtype,
        quantization=quantization_of(ALL[shape], weights),
        steps=tuple(Step(*size) for size in row["steps"]),
    )
    plan = TrialPlan(sizes=sizes, device=device, table=table, graphs=device == "cuda")
    limits = TimeLimits()
    if budget := row["budget"]:
        limits = limits._replace(budget=budget, limit=budget + 20)
    found = run_trials(plan, limits)
    if folder is not None and not found.failed:
        choices.write(folder, shape, weights, found.outcomes, found.selection)
    return {
        **row,
        "right": not found.failed,
        "seconds": round(found.seconds, 1),
        "trials": len(found.outcomes),
        "untried": found.untried,
        "selection": found.selection,
        "graphs": found.graphs and found.graphs.refused,
        "chosen": {
            "/".join(map(str, (kernel, *size.facts, *size.sizes))): name
            for (kernel, size), name in found.choices.chosen.items()
        },
        "outcomes": [asdict(each) for each in found.outcomes],
        "said": [*found.lines()],
    }


def _line(row: Row) -> str:
    return (
        f"{row['trials']} trials in {row['seconds']} s, {row['untried']} untried, "
        f"{row['selection']}: {'; '.join(row['said'][:3])}"
    )


if __name__ == "__main__":
    main()
