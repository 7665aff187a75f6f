"""Time another project's routed experts on the GPU, beside ours and torch's.

    python -m benchmarks.gpu.yardstick --from FOLDER --tokens 64 512 2048 --out yardstick.json

FOLDER stays outside this repository. NAME_experts.py in it has `experts_forward(x_TH, w31_EFH,
w2_EHI, ids_TK, weights_TK, config)`, weights as in kernels/experts.py (up rows first), and CONFIGS:
by the count of tokens, of which the nearest is taken, configs by name. All run in CUDA graphs from
a cold L2 cache on the same inputs, in bfloat16, and are compared with torch's result. `share` is of
the measured copy bandwidth, for the weights of the experts that the tokens meet.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import Which
from benchmarks.gpu.check_kernels import LIMITS
from benchmarks.gpu.measure import ceilings, graphed, median_s
from benchmarks.gpu.program import Row, arguments, run
from benchmarks.gpu.shapes import ALL, Work
from diffray.kernels.choose import TORCH, triton_kernels
from diffray.kernels.experts import ExpertWeights
from diffray.kernels.kernel import Run
from diffray.kernels.router import Routing


def main() -> None:
    parser = arguments("Time another project's routed experts on the GPU, beside ours and torch's.")
    parser.add_argument("--from", type=Path, required=True, dest="folder", metavar="FOLDER")
    parser.add_argument("--shape", choices=ALL, nargs="+", default=["llada-moe-7b-a1b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--runs", type=int, default=30)
    args = parser.parse_args()
    if not _others(args.folder):
        print(f"Nothing to compare with: {args.folder} has no NAME_experts.py.", file=sys.stderr)
        raise SystemExit(2)
    run(plan, args, _line)


def _others(folder: Path) -> list[str]:
    return sorted(file.stem.removesuffix("_experts") for file in folder.glob("*_experts.py"))


def plan(args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """Return a timing for each model, count of tokens and project."""
    every = product(args.shape, args.tokens, ["ours", "torch", *_others(args.folder)])
    return {f"{s} {t} tokens, {whose}": partial(timed, args, s, t, whose) for s, t, whose in every}


def timed(
    args: argparse.Namespace, shape: str, tokens: int, whose: str, device: str = "cuda"
) -> Row:
    """Return the time, the share of the bandwidth and the error of each config of a project."""
    from diffray.kernels.triton.compile_ahead import compiled_ahead

    inputs: list[Any] = []

    def noted(*given: Any) -> Any:
        inputs[:] = given
        return TORCH.experts(*given)

    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # as Triton's interpreter can
    case = Which(shape, Work(1, tokens, tokens), dtype, "experts").case(torch.device(device))
    expected = case.run(TORCH._replace(experts=noted))[0].double()
    _, (w31, w2, _), (ids, *_) = inputs
    met, bytes_per_s = len(ids.unique()), ceilings().bytes_per_s
    floor_s = met * (w31[0].nbytes + w2[0].nbytes) / bytes_per_s
    runs, configs = _runs(args, whose, inputs), list[Row]()
    with compiled_ahead(os.cpu_count() or 1):
        for each in runs.values():
            each(*inputs)
    for name, each in runs.items():
        error = float((each(*inputs).double() - expected).norm() / expected.norm())
        took_s = median_s(graphed(partial(each, *inputs)), args.runs)
        row = {"config": name, "us": took_s * 1e6, "share": floor_s / took_s, "error": error}
        configs.append(row)
    return {
        "shape": shape,
        "tokens": tokens,
        "whose": whose,
        "distinct_experts": met,
        "bytes_per_s": bytes_per_s,
        "configs": sorted(configs, key=lambda row: row["us"]),
        "right": all(row["error"] < LIMITS[dtype] for row in configs),
    }


def _runs(args: argparse.Namespace, whose: str, inputs: list[Any]) -> dict[str, Run]:
    """Return a project's configs by name; ours and torch's have one."""
    if whose in ("ours", "torch"):
        return {whose: (triton_kernels() if whose == "ours" else TORCH).experts}
    sys.path.insert(0, str(args.folder))
    module = import_module(f"{whose}_experts")
    nearest = min(module.CONFIGS, key=lambda tokens: abs(tokens - len(inputs[0])))

    def call(config: Any, x_TH: Any, weights: ExpertWeights, routing: Routing) -> Any:
        return module.experts_forward(x_TH, *weights[:2], *routing[:2], config)

    return {name: partial(call, config) for name, config in module.CONFIGS[nearest].items()}


def _line(row: Row) -> str:
    best = [f"{c['us']:.1f} us ({c['share']:.0%}) {c['config']}" for c in row["configs"][:3]]
    return "; ".join(best)


if __name__ == "__main__":
    main()
