"""Check each Triton kernel on the GPU against its torch reference.

    python -m benchmarks.gpu.check_kernels
    python -m benchmarks.gpu.check_kernels --shape llada2-mini --out check.json

Both run on the device, in float32 and in bfloat16, on the same random numbers. The error is
|out - reference| / |reference|; each kernel runs twice, which must give the same bits. Exit status
1 if an error is too large.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Which, listed
from benchmarks.gpu.program import Row, arguments, need_cuda, run
from benchmarks.gpu.shapes import SHAPES, Work
from diffray.kernels.choose import TORCH, Kernels, triton_kernels

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
ROUNDED_LIMIT = 5e-2
# Of integers, the share that may differ: rounding decides between near equals.
ID_LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.1}
WORKS = (Work(1, 64, 1024), Work(3, 64, 1000), Work(8, 33, 2048), Work(2, 700, 700))


def main() -> None:
    parser = arguments("Check each Triton kernel on the GPU against its torch reference.")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=[*SHAPES])
    args = parser.parse_args()
    need_cuda()
    run(plan, args, lambda row: f"{row['error']:.1e}, ids {row['ids_differ']:.3f}")


def plan(args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """Return a check for each kernel, shape, size and dtype."""
    every = listed(args.shape, WORKS, list(LIMITS))
    return {str(which): partial(check, which, torch.device("cuda")) for which in every}


def check(which: Which, device: torch.device, kernels: Kernels | None = None) -> Row:
    """Return a kernel's error against the reference, and whether that will do."""
    torch.backends.cuda.matmul.allow_tf32 = False
    case, kernels = which.case(device), kernels or triton_kernels()
    got, expected, again = case.run(kernels), case.run(TORCH), case.run(kernels)
    stable = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    error, differ = _compare(case, got, expected)
    # Not a number is not less than the limit.
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
        if ours.numel() == 0:
            continue
        if case.exact_ids:
            ours, theirs = ours[same], theirs[same]
        reference = theirs.double()
        errors.append(float((ours.double() - reference).norm() / reference.norm().clamp(min=1e-30)))
    return max(errors), 1.0 - float(same.float().mean())


if __name__ == "__main__":
    main()
