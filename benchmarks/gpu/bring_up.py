"""Check the kernels as the first start of a model does on a GPU.

python -m benchmarks.gpu.bring_up --shape llada-moe-7b-a1b --weights bfloat16 float8
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product

from benchmarks.gpu.program import Row, arguments, run
from benchmarks.gpu.random_model import WEIGHTS, config_of, quantization_of
from benchmarks.gpu.shapes import ALL, SHAPES
from diffray.workers.bring_up.check import CheckPlan
from diffray.workers.bring_up.child import run_check
from diffray.workers.bring_up.one_layer import Sizes
from diffray.workers.bring_up.start import LIMITS, TABLE

_LENGTH = 4096  # of the longest context


def main() -> None:
    parser = arguments("Check the kernels as the first start of a model does on a GPU.")
    parser.add_argument("--shape", choices=ALL, nargs="+", default=[*SHAPES])
    parser.add_argument("--weights", choices=WEIGHTS, nargs="+", default=["bfloat16"])
    run(plan, parser.parse_args(), lambda row: f"{row['seconds']} s: {'; '.join(row['said'])}")


def plan(args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """Return a check for each model and kind of weights."""
    return {f"{s} {w}": partial(checked, s, w) for s, w in product(args.shape, args.weights)}


def checked(shape: str, weights: str) -> Row:
    """Check the kernels of a model; right if none is refused."""
    sizes = Sizes(
        config=config_of(ALL[shape], _LENGTH),
        dtype="bfloat16",
        quantization=quantization_of(ALL[shape], weights),
    )
    plan = CheckPlan(sizes=sizes, device="cuda", table=TABLE)
    found = run_check(plan, LIMITS)
    return {
        "shape": shape,
        "weights": weights,
        "right": not (found.failed or found.refused),
        "seconds": round(found.seconds, 1),
        "refused": found.refused,
        "said": [*found.lines()],
    }


if __name__ == "__main__":
    main()
