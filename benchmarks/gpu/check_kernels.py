"""Check each Triton kernel on the GPU against its torch reference.

    python -m benchmarks.gpu.check_kernels
    python -m benchmarks.gpu.check_kernels --shape llada2-mini --out check.json
    python -m benchmarks.gpu.check_kernels --choices choices --variants right

Both run on the device, in bfloat16 and in float32, on the same random numbers. The error is
|out - reference| / |reference|; each kernel runs twice, which must give the same bits. The exit
status is 1 if an error is too large. Checks the default variants and those that bring-up chose, or,
with `--variants right`, all that bring-up found right.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import choices
from benchmarks.gpu.cases import Case, Which, listed
from benchmarks.gpu.measure import noted_variants
from benchmarks.gpu.program import Row, arguments, run
from benchmarks.gpu.shapes import ALL, SHAPES, Work
from diffray.kernels.choose import TORCH, Kernels, triton_kernels
from diffray.kernels.variants import Choices

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
    parser.add_argument("--variants", choices=("used", "right"), default="used")
    args = parser.parse_args()
    run(plan, args, _line)


def _line(row: Row) -> str:
    return f"{row['error']:.1e}, ids {row['ids_differ']:.3f}" if "error" in row else row["told"]


def plan(args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """Return a check for each kernel, shape, size and dtype, in each variant that is wanted."""
    found: dict[str, Callable[[], Row]] = {}
    for which in listed(args.shape, WORKS, [DTYPES[name] for name in args.dtype]):
        for name, chosen in _wanted(which, args):
            found[f"{which}, {name}"] = partial(checked, which, name, chosen)
    return found


def _wanted(which: Which, args: argparse.Namespace) -> Iterator[tuple[str, Choices]]:
    """Yield the choices to check a kernel with, and their names."""
    if args.variants == "used":
        for kind in choices.kinds(args.choices, which.shape):
            yield kind, choices.choices_for(kind, args.choices, which.shape)
        return
    own = which.kernel.split()[0]  # "router" stands for two kernels
    for name in choices.right_variants(args.choices, which.shape):
        kernel, variant = name.split(" ", 1)
        if kernel == own or (own == "router" and kernel.endswith("_router")):
            yield name, choices.Only({}, kernel=kernel, variant=variant)


def checked(which: Which, name: str, chosen: Choices, device_name: str = "cuda") -> Row:
    """Return the check of a kernel with these choices, and the variants that ran."""
    with noted_variants() as ran:
        try:
            row = check(which, torch.device(device_name), triton_kernels(chosen))
        except choices.NotOfferedError as missing:
            return which.columns | {"variants": name, "told": str(missing)}
    return row | {"variants": name, "ran": ran}


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
