"""Check each Triton kernel on the GPU against its torch reference.

    python -m benchmarks.gpu.check_kernels
    python -m benchmarks.gpu.check_kernels --shape llada2-mini --out check.json

Both run on the device, in float32 and in bfloat16, on the same random numbers. The error is
|out - reference| / |reference|; each kernel runs twice, which must give the same bits. Exit status
1 if an error is too large.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Work, cases
from benchmarks.gpu.measure import arguments, facts, need_cuda, write_report
from benchmarks.gpu.shapes import SHAPES, Shape
from diffray.kernels.choose import TORCH, Kernels, triton_kernels

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Of integers, the share that may differ: rounding decides between near equals.
ID_LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.1}
WORKS = (Work(1, 32, 512), Work(3, 64, 1000), Work(8, 33, 2048), Work(2, 700, 700))


def main() -> None:
    parser = arguments("Check each Triton kernel on the GPU against its torch reference.")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    args = parser.parse_args()
    device = need_cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[dict[str, Any]] = []
    try:
        for name in args.shape or SHAPES:
            for work in WORKS:
                for dtype in LIMITS:
                    for row in check(SHAPES[name], work, dtype, device, triton_kernels()):
                        rows.append({"shape": name, **row})
                        print(_line(rows[-1]), flush=True)
    finally:
        wrong = [row for row in rows if not row["right"]]
        write_report({"facts": facts(), "checks": rows, "wrong": len(wrong)}, args.out)
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(rows)} checks failed; see the lines marked WRONG")


def check(
    shape: Shape, work: Work, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel: its error against the reference, and whether that will do."""
    plain = TORCH
    torch.manual_seed(work.tokens)
    for case in cases(shape, work, dtype, device):
        if case.kernel.endswith("in place"):
            continue  # the same kernel again, as it is timed
        got = case.run(kernels)
        expected = case.run(plain)
        again = case.run(kernels)
        stable = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        row = _compare(case, got, expected, dtype)
        yield {
            "kernel": case.kernel,
            "rows": work.rows,
            "window": work.window,
            "context": work.context,
            "dtype": str(dtype).removeprefix("torch."),
            **row,
            "same_bits_twice": stable,
            "right": row["right"] and stable,
        }


def _compare(
    case: Case, got: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the largest error of a kernel's outputs; rows whose ids differ are counted instead."""
    same = torch.ones(len(got[0]), dtype=torch.bool, device=got[0].device)
    if case.exact_ids:
        same = (got[0] == expected[0]).flatten(1 if got[0].dim() > 1 else 0)
        same = same.all(1) if same.dim() > 1 else same
    differ = 1.0 - float(same.float().mean())
    errors = []
    for ours, theirs in zip(got[case.exact_ids :], expected[case.exact_ids :], strict=True):
        if ours.numel() == 0:
            continue
        if case.exact_ids:
            ours, theirs = ours[same], theirs[same]
        reference = theirs.double()
        errors.append(float((ours.double() - reference).norm() / reference.norm().clamp(min=1e-30)))
    error = max(errors)
    # Not a number is not less than the limit.
    right = error < LIMITS[dtype] and differ <= ID_LIMITS[dtype]
    return {"error": error, "ids_differ": differ, "right": right}


def _line(row: dict[str, Any]) -> str:
    mark = "ok   " if row["right"] else "WRONG"
    place = f"{row['shape']} {row['rows']}x{row['window']}@{row['context']} {row['dtype']}"
    return f"{mark} {row['kernel']:36} {place:44} {row['error']:.1e} ids {row['ids_differ']:.3f}"


if __name__ == "__main__":
    main()
