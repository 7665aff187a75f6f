"""Check each Triton kernel on the GPU against its torch reference.

    python -m benchmarks.gpu.check_kernels
    python -m benchmarks.gpu.check_kernels --shape llada2-mini --out check.json

Both run on the device, in bfloat16 and in float32, on the same random numbers. The error is
|out - reference| / |reference|; each kernel runs twice, which must give the same bits. The exit
status is 1 if an error is too large.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Which, listed
from benchmarks.gpu.program import Row, arguments, run
from benchmarks.gpu.shapes import ALL, SHAPES, Work
from diffray.kernels.choose import TORCH, Kernels, triton_kernels

LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
ROUNDED_LIMIT = 5e-2
# The share of integers that may differ: rounding decides between nearly equal values.
ID_LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.1}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in LIMITS}
WORKS = (Work(1, 64, 1024), Work(3, 64, 1000), Work(8, 33, 2048), Work(2, 700, 700))


def main() -> None:
    parser = arguments("Check each Triton kernel on the GPU against its torch reference.")
    parser.add_argument("--shape", choices=ALL, nargs="+", default=[*SHAPES])
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=[*DTYPES])
    run(plan, parser.parse_args(), _line)


def _line(row: Row) -> str:
    return f"{row['error']:.1e}, ids {row['ids_differ']:.3f}"


def plan(args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """Return a check for each kernel, shape, size and dtype."""
    every = listed(args.shape, WORKS, [DTYPES[name] for name in args.dtype])
    return {str(which): partial(checked, which) for which in every}


def checked(which: Which) -> Row:
    return check(which, torch.device("cuda"), triton_kernels())


def check(which: Which, device: torch.device, kernels: Kernels) -> Row:
    """Return a kernel's error against the reference, and whether it is within the limit."""
    torch.backends.cuda.matmul.allow_tf32 = False
    case = which.case(device)
    got, expected, again = case.run(kernels), case.run(TORCH), case.run(kernels)
    stable = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    error, differ = _compare(case, got, expected)
    # NaN fails this comparison.
    limit = ROUNDED_LIMIT if case.rounds else LIMITS[which.dtype]
    right = stable and error < limit and differ <= ID_LIMITS[which.dtype]
    found = {"error": error, "ids_differ": differ, "same_bits_twice": stable, "right": right}
    return which.columns | found


def _compare(
    case: Case, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]
) -> tuple[float, float]:
    """Return the largest error of a kernel's outputs; rows whose ids differ are counted instead."""
    same = torch.ones(len(got[0]), dtype=torch.bool, device=got[0].device)
    if case.exact_ids:
        same = (got[0] == expected[0]).view(len(same), -1).all(1)
    errors = []
    for ours, theirs in zip(got[case.exact_ids :], expected[case.exact_ids :], strict=True):
        if ours.numel():
            kept = same if case.exact_ids else ...
            exact = theirs[kept].double()
            error = (ours[kept].double() - exact).norm() / exact.norm().clamp(min=1e-30)
            errors.append(float(error))
    return max(errors), 1.0 - float(same.float().mean())


if __name__ == "__main__":
    main()
