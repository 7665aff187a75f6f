"""Rounds activations to float8 in Triton, to the same bits as `kernels/quantize.py`.

Letters: T rows, I columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels.triton.launch import overlapped, wait_for_previous
from diffray.kernels.triton.norm import warps_of


def float8_rows(x_TI: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Return the rows in float8 and the scale of each [T, 1], a power of 2."""
    rounded_TI = torch.empty_like(x_TI, dtype=torch.float8_e4m3fn)
    scale_T1 = x_TI.new_empty(len(x_TI), 1, dtype=torch.float32)
    _launch(x_TI, rounded_TI, scale_T1, pdl)
    return rounded_TI, scale_T1


def round_rows(x_TI: Tensor, *, pdl: bool = False) -> Tensor:
    """Return the rounded rows in their own dtype."""
    out_TI = torch.empty_like(x_TI)
    _launch(x_TI, out_TI, None, pdl)
    return out_TI


def _launch(x_TI: Tensor, out_TI: Tensor, scale_T1: Tensor | None, pdl: bool) -> None:
    rows, columns = x_TI.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(columns)
    _round_row[(rows,)](
        x_TI.contiguous(),
        out_TI,
        scale_T1,
        columns,
        APART=scale_T1 is not None,
        BLOCK=block,
        num_warps=warps_of(block),
        **overlapped(pdl),
    )


@triton.jit
def _round_row(
    x_ptr,
    out_ptr,
    scale_ptr,
    columns,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round one row; store its scale apart, or multiply the row by it again."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    x, scale = float8_row(x)
    if APART:
        tl.store(scale_ptr + row, scale)
    else:
        x *= scale
    tl.store(out_ptr + row * columns + at, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def float8_row(x):
    """Return the float8 numbers of a float32 row, still in float32, and their scale.

    Uses only integers and sums, because conversions to float8 differ between devices.
    """
    largest = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12)
    # The smallest power of 2 by which the row can be divided to fit 1.75 * 2**8.
    power = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    scale = power.to(tl.float32, bitcast=True)
    x *= ((254 << 23) - power).to(tl.float32, bitcast=True)
    # Numbers have three bits after the leading one, which is worth at least 2**-6. Adding and
    # subtracting a number this large rounds off all further bits.
    first = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    added = tl.maximum(first, 0.015625) * 1572864.0  # 1.5 * 2**20
    return (x + added) - added, scale
