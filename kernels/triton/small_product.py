"""A product of few rows in Triton, split over its input columns; the norm after it sums the splits.

Every block of columns reads all rows through the L2 cache, so more splits read no more. cuBLAS sums
in a separate kernel, and cannot fetch weights while the kernel before it runs.

Letters: T rows, I input columns, O output columns, C splits of the input columns.
"""

from functools import partial
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels import linear
from diffray.kernels.triton.launch import (
    overlapped,
    prefetch_rows,
    variants_of,
    wait_for_previous,
)
from diffray.kernels.triton.norm import add_norm, add_norm_of_parts
from diffray.kernels.variants import Kernel, Shape, Variant, rounded_up

_MOST_ROWS: Final = 64
_PROGRAMS: Final = 128  # so that nearly all multiprocessors read
_DEPTH: Final = 64


def linear_add_norm(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
    *,
    fused: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `add_norm` of a product; if `fused`, the norm sums the parts of `split_product`."""
    if fused and len(x_TI) > 0:
        parts_CTO = split_product(x_TI, weight_OI, pdl=pdl)
        return add_norm_of_parts(parts_CTO, residual_TO, norm_O, eps, pdl=pdl)
    return add_norm(linear.linear(x_TI, weight_OI), residual_TO, norm_O, eps, pdl=pdl)


def split_product(x_TI: Tensor, weight_OI: Tensor, *, pdl: bool = False) -> Tensor:
    """Return the float32 parts of x @ weight.T [C, T, O], to be summed."""
    (num_rows, inputs), outputs = x_TI.shape, len(weight_OI)
    columns = 128 if outputs >= 4096 else 64
    blocks = triton.cdiv(outputs, columns)
    share = triton.cdiv(triton.cdiv(inputs, triton.cdiv(_PROGRAMS, blocks)), _DEPTH) * _DEPTH
    splits = triton.cdiv(inputs, share)
    parts_CTO = x_TI.new_empty(splits, num_rows, outputs, dtype=torch.float32)
    _split_product[(blocks, splits)](
        x_TI.contiguous(),
        weight_OI,
        parts_CTO,
        num_rows,
        inputs,
        outputs,
        ROWS=max(rounded_up(num_rows), 16),
        COLUMNS=columns,
        DEPTH=_DEPTH,
        SHARE=share,
        AHEAD=share if inputs % share == 0 else 1,
        num_warps=4,
        num_stages=4,
        **overlapped(pdl),
    )
    return parts_CTO


def _variants(x_TI: Tensor, *_: Any) -> list[Variant]:
    found = variants_of(linear_add_norm)
    if x_TI.element_size() > 2 or rounded_up(len(x_TI)) > _MOST_ROWS:
        return found
    return found + variants_of(partial(linear_add_norm, fused=True), "triton fused")


def _shape(x_TI: Tensor, weight_OI: Tensor, *_: Any) -> Shape:
    return Shape((*weight_OI.shape, str(x_TI.dtype)), (rounded_up(len(x_TI)),))


LINEAR_ADD_NORM: Final = Kernel("linear_add_norm", linear.linear_add_norm, _shape, _variants)


@triton.jit(do_not_specialize=["num_rows"])
def _split_product(
    x_ptr,
    w_ptr,
    out_ptr,
    num_rows,
    inputs,
    outputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARE: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply all rows with some columns, in one split of the input columns."""
    split = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    low = split * SHARE
    prefetch_rows(w_ptr + low, column, outputs, inputs, AHEAD, PDL)
    wait_for_previous(PDL)
    row = tl.arange(0, ROWS)
    live, wide = row < num_rows, column < outputs
    x_rows = x_ptr + row[:, None] * inputs
    w_rows = w_ptr + column.to(tl.int64)[:, None] * inputs
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for deep in range(low, tl.minimum(low + SHARE, inputs), DEPTH):
        at = deep + tl.arange(0, DEPTH)
        inside = (at < inputs)[None, :]
        x = tl.load(x_rows + at[None, :], mask=live[:, None] & inside, other=0.0)
        w = tl.load(w_rows + at[None, :], mask=wide[:, None] & inside, other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    out = out_ptr + (split * num_rows + row)[:, None] * outputs + column[None, :]
    tl.store(out, total, mask=live[:, None] & wide[None, :])
