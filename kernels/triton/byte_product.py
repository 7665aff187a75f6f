"""Products with matrices of one byte per weight in Triton, split over the input columns.

Weights are widened in registers, so only one byte per weight is read from memory. Many float8 rows
are multiplied by torch's product of float8 matrices.

Letters: T rows, I input columns, O output columns, C splits of the input columns.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels import quantized
from diffray.kernels.kernel import Kernel, Tile
from diffray.kernels.quantize import Quantized
from diffray.kernels.triton.float8_rows import float8_rows, round_rows
from diffray.kernels.triton.launch import overlapped, prefetch_rows, staged, wait_for_previous

_PROGRAMS: Final = 128  # so that nearly all multiprocessors read
_MOST_READ: Final = 64  # rows up to which the weights' bytes limit the product, not operations
# Scales bfloat16 down to float16, whose range is smaller; what is still too large is clamped. Rows
# of which no number exceeds 1e-4 lose digits.
_SHRUNK = tl.constexpr(2.0**-5)


def quantized_linear(
    x_TI: Tensor,
    kept: Quantized,
    bias_O: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return x @ weight.T + bias for weights in int8 or float8 with a scale per row.

    Scales are applied to the float32 sums.
    """
    (num_rows, inputs), outputs = x_TI.shape, len(kept)
    assert kept.format.in_bytes
    if num_rows > _MOST_READ and kept.format.rounds_inputs and _multiplies_float8(x_TI, kept):
        return scaled_mm(x_TI, kept, bias_O, pdl=pdl)
    out_TO = x_TI.new_empty(num_rows, outputs)
    if num_rows == 0:
        return out_TO
    x_TI = round_rows(x_TI, pdl=pdl) if kept.format.rounds_inputs else x_TI.contiguous()
    # float8 converts to float16 in fewer instructions than to bfloat16.
    half = kept.format.is_float8 and x_TI.dtype == torch.bfloat16
    tile = _tile_for(x_TI)
    lanes, blocks = triton.cdiv(num_rows, tile.rows), triton.cdiv(outputs, tile.columns)
    splits = triton.cdiv(_PROGRAMS, blocks) if lanes == 1 else 1
    share = triton.cdiv(triton.cdiv(inputs, splits), tile.depth) * tile.depth
    splits = triton.cdiv(inputs, share)
    split = splits > 1
    sums = x_TI.new_empty(splits, num_rows, outputs, dtype=torch.float32) if split else out_TO
    _byte_product[(lanes, blocks, splits)](
        x_TI,
        kept.values_EOI,
        kept.scale_EOG,
        None if split else bias_O,
        sums,
        num_rows,
        inputs,
        outputs,
        share,
        HALF=half,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        AHEAD=tile.depth if inputs % tile.depth == 0 else 1,
        **staged(tile),
        **overlapped(pdl),
    )
    if split:
        size, block = out_TO.numel(), 1024
        _sum_parts[(triton.cdiv(size, block),)](
            sums, bias_O, out_TO, size, outputs, PARTS=splits, BLOCK=block, **overlapped(pdl)
        )
    return out_TO


def scaled_mm(
    x_TI: Tensor,
    kept: Quantized,
    bias_O: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return the same by torch's product of float8 matrices."""
    rounded_TI, scale_T1 = float8_rows(x_TI, pdl=pdl)
    return torch._scaled_mm(
        rounded_TI,
        kept.values_EOI.t(),
        scale_T1,
        kept.scale_EOG.t(),
        bias_O,
        out_dtype=x_TI.dtype,
    )


def _tile_for(x_TI: Tensor) -> Tile:
    rows = max(triton.next_power_of_2(len(x_TI)), 16)
    if x_TI.element_size() > 2:  # exact float32 uses no matrix units
        return Tile(min(rows, 32), 32, 32, 4, 2)
    return Tile(rows, 64, 128, 4, 4) if rows <= _MOST_READ else Tile(128, 128, 64, 8, 4)


def _multiplies_float8(x_TI: Tensor, kept: Quantized) -> bool:
    """Return whether torch multiplies float8 matrices of these sizes on this device."""
    if x_TI.dtype != torch.bfloat16 or any(size % 16 for size in kept.shape):
        return False
    return not x_TI.is_cuda or torch.cuda.get_device_capability(x_TI.device) >= (8, 9)


QUANTIZED_LINEAR: Final = Kernel("quantized_linear", quantized.quantized_linear, quantized_linear)


@triton.jit(do_not_specialize=["num_rows"])
def _byte_product(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    inputs,
    outputs,
    share,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply some rows with some columns, in one split of the input columns."""
    split = tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    low = split * share
    prefetch_rows(w_ptr + low, column, outputs, inputs, AHEAD, PDL)
    wait_for_previous(PDL)
    # Programs with the same columns run side by side, so weights are read from memory once.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live, wide = row < num_rows, column < outputs
    x_rows = x_ptr + row.to(tl.int64)[:, None] * inputs
    w_rows = w_ptr + column.to(tl.int64)[:, None] * inputs
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for deep in range(low, tl.minimum(low + share, inputs), DEPTH):
        at = deep + tl.arange(0, DEPTH)
        inside = (at < inputs)[None, :]
        x = tl.load(x_rows + at[None, :], mask=live[:, None] & inside, other=0.0)
        if HALF:
            x = tl.minimum(tl.maximum(x.to(tl.float32) * _SHRUNK, -65504.0), 65504.0)
            x = x.to(tl.float16)
        w = tl.load(w_rows + at[None, :], mask=wide[:, None] & inside, other=0.0).to(x.dtype)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    total *= tl.load(scale_ptr + column, mask=wide, other=0.0)[None, :]
    if HALF:
        total *= 1 / _SHRUNK
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=wide, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + (split * num_rows + row).to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=live[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["size"])
def _sum_parts(
    parts_ptr,
    bias_ptr,
    out_ptr,
    size,
    outputs,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the splits of some numbers, then the bias."""
    wait_for_previous(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * size + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
