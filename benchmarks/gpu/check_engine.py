"""Check the engine on the GPU: golden tokens, noise, memory, graphs, and waiting for the device.

    python -m benchmarks.gpu.check_engine
    python -m benchmarks.gpu.check_engine --family llada --device cpu

It needs what the engine needs (torch, pydantic, safetensors, tqdm), and this checkout: the golden
checkpoints are in `tests/golden`. Some checks only report, such as how many answers bfloat16
changes, and have no verdict. The exit status is 1 if something is wrong.
"""

import argparse
from collections.abc import Callable

from benchmarks.gpu.program import Row, arguments, run


def main() -> None:
    parser = arguments("Check the engine on the GPU.")
    parser.add_argument("--family", nargs="+", help="default: all that denoise masks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    run(plan, args, lambda row: str(row["told"]), engine=True)


def plan(args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """Return every check; what only a GPU can tell comes first."""
    from benchmarks.gpu.engine_checks import checks

    return checks(args.device, args.family)


if __name__ == "__main__":
    main()
