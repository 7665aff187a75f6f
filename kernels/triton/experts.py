"""Gated experts in Triton: list each expert's pairs, gate-up-SiLU, down, then sum in order.

A program owns some columns of one expert and a tile of its rows; programs of the same columns run
side by side, so weights are read from memory once. If an expert has more rows than expected, each
program continues with further tiles. Nothing is added atomically: the same pairs give the same
bits, whatever else is in the batch.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: gate
rows, then up rows), K experts of a token, S token-expert pairs (T * K).
"""

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels import experts, quantized
from diffray.kernels.variants import Kernel, Shape, Tile, rounded_up, tiled


def experts_forward(
    x_TH: Tensor,
    w13_EFH: Tensor,
    w2_EHI: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    tile: Tile | None = None,
) -> Tensor:
    """Return each token's weighted sum over its experts [T, H].

    Ids outside [0, E) name experts of other ranks and add nothing.
    """
    return quantized_experts_forward(x_TH, w13_EFH, None, w2_EHI, None, ids_TK, weights_TK, tile)


def quantized_experts_forward(
    x_TH: Tensor,
    w13_EFH: Tensor,
    scale13_EF: Tensor | None,
    w2_EHI: Tensor,
    scale2_EH: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
    tile: Tile | None = None,
) -> Tensor:
    """Return `experts_forward` for weights in int8 or float8 with a scale per row.

    The arithmetic is that of `x_TH`'s dtype; scales are applied to the float32 sums.
    """
    if ids_TK.numel() == 0:
        return torch.empty_like(x_TH)
    num_tokens, num_chosen = ids_TK.shape
    num_experts, hidden, width = w2_EHI.shape
    num_pairs = num_tokens * num_chosen
    tile = tile or tile_for(num_pairs / num_experts, x_TH.element_size())
    out_TH = torch.empty_like(x_TH)
    ids_TK, weights_TK = ids_TK.contiguous(), weights_TK.contiguous()
    starts_E = torch.empty(num_experts + 1, dtype=torch.int32, device=x_TH.device)
    order_S = torch.empty(num_pairs, dtype=torch.int32, device=x_TH.device)
    _list_pairs[(num_experts + 1,)](
        ids_TK, starts_E, order_S, num_pairs, num_experts, CHUNK=1024, num_warps=4
    )

    # Row tiles of an expert run side by side; in sequence each would read its weights again.
    lanes = triton.cdiv(_fullest(num_pairs / num_experts), tile.rows)
    mid_SI = x_TH.new_empty(num_pairs, width)
    _gate_up[(lanes * triton.cdiv(width, tile.columns), num_experts)](
        x_TH.contiguous(),
        w13_EFH,
        scale13_EF,
        mid_SI,
        starts_E,
        order_S,
        hidden,
        width,
        lanes,
        CHOSEN=num_chosen,
        SCALED=scale13_EF is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )

    part_SH = x_TH.new_empty(num_pairs, hidden)
    _down[(lanes * triton.cdiv(hidden, tile.columns), num_experts)](
        mid_SI,
        w2_EHI,
        scale2_EH,
        weights_TK,
        part_SH,
        starts_E,
        order_S,
        hidden,
        width,
        lanes,
        SCALED=scale2_EH is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )

    block = min(triton.next_power_of_2(hidden), 1024)
    _sum_pairs[(num_tokens, triton.cdiv(hidden, block))](
        part_SH, ids_TK, out_TH, hidden, num_experts, CHOSEN=num_chosen, BLOCK=block, num_warps=4
    )
    return out_TH


def _tiles(x_TH: Tensor, num_experts: int, num_chosen: int) -> list[Tile]:
    """Return the default tile for about as many tokens, then others that may be faster."""
    default = tile_for(rounded_up(len(x_TH)) * num_chosen / num_experts, x_TH.element_size())
    if x_TH.element_size() > 2:  # others take minutes to compile
        return [default]
    smaller = [Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 3)] if default.rows == 128 else []
    as_many_rows = [
        Tile(default.rows, columns, depth, warps, stages)
        for columns in (32, 64, 128)
        for depth in (64, 128)
        for warps, stages in ((4, 3), (4, 4), (8, 3))
    ]
    return list(dict.fromkeys([default, *smaller, *as_many_rows]))


def _shape(x_TH: Tensor, w13_EFH: Tensor, w2_EHI: Tensor, ids_TK: Tensor) -> Shape:
    kinds = str(x_TH.dtype), str(w13_EFH.dtype)
    return Shape((*w2_EHI.shape, ids_TK.shape[1], *kinds), (rounded_up(len(x_TH)),))


def _is_grouped_mm_a_kernel(x_TH: Tensor, w2_EHI: Tensor) -> bool:
    """Whether torch multiplies these without a loop over experts, which would sync the host."""
    if x_TH.dtype != torch.bfloat16 or any(n % 16 for n in w2_EHI.shape[1:]):
        return False
    return not x_TH.is_cuda or torch.cuda.get_device_capability(x_TH.device)[0] in (9, 10)


EXPERTS: Final = Kernel(
    "experts_forward",
    experts.experts_forward,
    lambda x, w13, w2, ids, _weights: _shape(x, w13, w2, ids),
    lambda x, _w13, w2, ids, _weights: [
        tiled("triton", tile, experts_forward) for tile in _tiles(x, len(w2), ids.shape[1])
    ],
    recordable=lambda x, _w13, w2, *_: _is_grouped_mm_a_kernel(x, w2),
)
QUANTIZED_EXPERTS: Final = Kernel(
    "quantized_experts_forward",
    quantized.quantized_experts_forward,
    lambda x, w13, _scale13, w2, _scale2, ids, _weights: _shape(x, w13, w2, ids),
    lambda x, _w13, _scale13, w2, _scale2, ids, _weights: [
        tiled("triton", tile, quantized_experts_forward)
        for tile in _tiles(x, len(w2), ids.shape[1])
    ],
    recordable=lambda x, _w13, _scale13, w2, *_: _is_grouped_mm_a_kernel(x, w2),
)


def _fullest(rows_per_expert: float) -> int:
    return max(math.ceil(rows_per_expert + 4 * math.sqrt(rows_per_expert)), 1)


def tile_for(rows_per_expert: float, itemsize: int) -> Tile:
    """Return a tile that fits nearly every expert, within reasonable sizes.

    Tokens spread over experts almost at random; the fullest is some deviations above the mean.
    """
    rows = max(triton.next_power_of_2(_fullest(rows_per_expert)), 16)
    if itemsize > 2:
        # Exact float32 uses no matrix units: large tiles spill and take minutes to compile.
        return Tile(min(rows, 32), 32, 32, 4, 2)
    if rows == 64:  # with depth 128 one program would fill a multiprocessor
        return Tile(rows, 64, 64, 4, 4)
    rows = min(rows, 128)
    return Tile(rows, 64, 128, 8 if rows == 128 else 4, 3)


@triton.jit(do_not_specialize=["num_pairs"])
def _list_pairs(ids_ptr, starts_ptr, order_ptr, num_pairs, num_experts, CHUNK: tl.constexpr):
    """List one expert's pairs in order, after those of the previous experts."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    before = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + first + lanes, mask=first + lanes < num_pairs, other=-1)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
    start = tl.sum(before, axis=0)
    tl.store(starts_ptr + expert, start)
    # One extra program writes the end of the last expert; it owns no pairs.
    if expert < num_experts:
        for first in range(0, num_pairs, CHUNK):
            ids = tl.load(ids_ptr + first + lanes, mask=first + lanes < num_pairs, other=-1)
            mine = (ids == expert).to(tl.int32)
            place = start + tl.cumsum(mine, axis=0) - 1
            tl.store(order_ptr + place, first + lanes, mask=mine == 1)
            start += tl.sum(mine, axis=0)


@triton.jit(do_not_specialize=["lanes"])
def _gate_up(
    x_ptr,
    w_ptr,
    scale_ptr,
    mid_ptr,
    starts_ptr,
    order_ptr,
    hidden,
    width,
    lanes,
    CHOSEN: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write silu(gate) * up of some columns of one expert, for all its pairs."""
    expert = tl.program_id(1)
    start, stop = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    lane = tl.program_id(0) % lanes
    columns = tl.program_id(0) // lanes * COLUMNS + tl.arange(0, COLUMNS)
    wide = columns < width
    gate_ptr = w_ptr + expert.to(tl.int64) * (2 * width * hidden) + columns[:, None] * hidden
    up_ptr = gate_ptr + width * hidden
    for first in range(start + lane * ROWS, stop, lanes * ROWS):
        rows = first + tl.arange(0, ROWS)
        live = rows < stop
        tokens = tl.load(order_ptr + rows, mask=live, other=0) // CHOSEN
        x_rows = x_ptr + tokens.to(tl.int64)[:, None] * hidden
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for deep in range(0, hidden, DEPTH):
            at = deep + tl.arange(0, DEPTH)
            inside = at < hidden
            x = tl.load(x_rows + at[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            here = wide[:, None] & inside[None, :]
            gate_w = tl.load(gate_ptr + at[None, :], mask=here, other=0.0).to(x.dtype)
            up_w = tl.load(up_ptr + at[None, :], mask=here, other=0.0).to(x.dtype)
            gate = tl.dot(x, tl.trans(gate_w), gate, input_precision="ieee")
            up = tl.dot(x, tl.trans(up_w), up, input_precision="ieee")
        if SCALED:
            scales = scale_ptr + expert * 2 * width + columns
            gate *= tl.load(scales, mask=wide, other=0.0)[None, :]
            up *= tl.load(scales + width, mask=wide, other=0.0)[None, :]
        mid = gate * tl.sigmoid(gate) * up
        mid_rows = mid_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(mid_rows, mid.to(mid_ptr.dtype.element_ty), mask=live[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["lanes"])
def _down(
    mid_ptr,
    w_ptr,
    scale_ptr,
    weights_ptr,
    part_ptr,
    starts_ptr,
    order_ptr,
    hidden,
    width,
    lanes,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write some columns of one expert's weighted output, one row per pair."""
    expert = tl.program_id(1)
    start, stop = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    lane = tl.program_id(0) % lanes
    columns = tl.program_id(0) // lanes * COLUMNS + tl.arange(0, COLUMNS)
    wide = columns < hidden
    w_rows = w_ptr + expert.to(tl.int64) * (hidden * width) + columns[:, None] * width
    for first in range(start + lane * ROWS, stop, lanes * ROWS):
        rows = first + tl.arange(0, ROWS)
        live = rows < stop
        pairs = tl.load(order_ptr + rows, mask=live, other=0)
        mid_rows = mid_ptr + rows.to(tl.int64)[:, None] * width
        out = tl.zeros((ROWS, COLUMNS), tl.float32)
        for deep in range(0, width, DEPTH):
            at = deep + tl.arange(0, DEPTH)
            inside = at < width
            mid = tl.load(mid_rows + at[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            here = wide[:, None] & inside[None, :]
            w = tl.load(w_rows + at[None, :], mask=here, other=0.0).to(mid.dtype)
            out = tl.dot(mid, tl.trans(w), out, input_precision="ieee")
        if SCALED:
            scales = scale_ptr + expert * hidden + columns
            out *= tl.load(scales, mask=wide, other=0.0)[None, :]
        out *= tl.load(weights_ptr + pairs, mask=live, other=0.0).to(tl.float32)[:, None]
        part_rows = part_ptr + pairs.to(tl.int64)[:, None] * hidden + columns[None, :]
        tl.store(part_rows, out.to(part_ptr.dtype.element_ty), mask=live[:, None] & wide[None, :])


@triton.jit
def _sum_pairs(
    part_ptr, ids_ptr, out_ptr, hidden, num_experts, CHOSEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum a token's pairs in order; pairs of other ranks were never written."""
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for chosen in tl.static_range(CHOSEN):
        pair = token * CHOSEN + chosen
        expert = tl.load(ids_ptr + pair)
        here = (expert >= 0) & (expert < num_experts)
        parts = part_ptr + pair.to(tl.int64) * hidden + at
        total += tl.load(parts, mask=inside & here, other=0.0).to(tl.float32)
    out = out_ptr + token.to(tl.int64) * hidden + at
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)
