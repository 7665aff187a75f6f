"""The two products of gated experts in Triton.

A program owns some columns of one expert and a tile of its rows; programs of the same columns run
side by side, so weights are read from memory once. If an expert has more rows than expected, each
program continues with further tiles. Nothing is added atomically: the same pairs give the same
bits, whatever else is in the batch.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: gate
rows, then up rows), K experts of a token, S token-expert pairs (T * K).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels.router import Pairs
from diffray.kernels.triton.launch import overlapped, prefetch_rows, wait_for_previous
from diffray.kernels.variants import Tile

# What comes between the products can exceed float16's range, unlike a norm's output.
_SHRUNK = tl.constexpr(2.0**-5)


def multiply_pairs(
    x_TH: Tensor,
    w13_EFH: Tensor,
    scale13_EF: Tensor | None,
    w2_EHI: Tensor,
    scale2_EH: Tensor | None,
    weights_TK: Tensor,
    pairs: Pairs,
    tile: Tile,
    *,
    half: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Return each pair's weighted output [S, H]; those of other ranks' experts are undefined.

    `half` multiplies in float16, which weights of a byte turn into in fewer instructions than into
    bfloat16.
    """
    num_experts, hidden, width = w2_EHI.shape
    num_pairs = weights_TK.numel()
    # Row tiles of an expert run side by side; in sequence each would read its weights again.
    lanes = triton.cdiv(fullest(num_pairs / num_experts), tile.rows)
    kind = torch.float16 if half else x_TH.dtype
    mid_SI = torch.empty(num_pairs, width, dtype=kind, device=x_TH.device)
    _gate_up[(lanes * triton.cdiv(width, tile.columns), num_experts)](
        x_TH.contiguous(),
        w13_EFH,
        scale13_EF,
        mid_SI,
        *pairs,
        hidden,
        width,
        lanes,
        CHOSEN=weights_TK.shape[1],
        HALF=half,
        SCALED=scale13_EF is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlapped(pdl),
    )
    part_SH = x_TH.new_empty(num_pairs, hidden)
    _down[(lanes * triton.cdiv(hidden, tile.columns), num_experts)](
        mid_SI,
        w2_EHI,
        scale2_EH,
        weights_TK.contiguous(),
        part_SH,
        *pairs,
        hidden,
        width,
        lanes,
        HALF=half,
        SCALED=scale2_EH is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlapped(pdl),
    )
    return part_SH


def fullest(rows_per_expert: float) -> int:
    """Return how many rows nearly every expert has at most.

    Tokens spread over experts almost at random; the fullest is some deviations above the mean.
    """
    return max(math.ceil(rows_per_expert + 4 * math.sqrt(rows_per_expert)), 1)


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
    HALF: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write silu(gate) * up of some columns of one expert, for all its pairs."""
    expert = tl.program_id(1)
    lane = tl.program_id(0) % lanes
    columns = tl.program_id(0) // lanes * COLUMNS + tl.arange(0, COLUMNS)
    wide = columns < width
    w_ptr += expert.to(tl.int64) * (2 * width * hidden)
    prefetch_rows(w_ptr, columns, width, hidden, DEPTH, PDL)
    prefetch_rows(w_ptr + width * hidden, columns, width, hidden, DEPTH, PDL)
    wait_for_previous(PDL)
    start, stop = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    gate_ptr = w_ptr + columns[:, None] * hidden
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
            if HALF:
                x = x.to(tl.float16)
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
        if HALF:
            mid = tl.minimum(tl.maximum(mid * _SHRUNK, -65504.0), 65504.0)
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
    HALF: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write some columns of one expert's weighted output, one row per pair."""
    expert = tl.program_id(1)
    lane = tl.program_id(0) % lanes
    columns = tl.program_id(0) // lanes * COLUMNS + tl.arange(0, COLUMNS)
    wide = columns < hidden
    w_ptr += expert.to(tl.int64) * (hidden * width)
    prefetch_rows(w_ptr, columns, hidden, width, DEPTH, PDL)
    wait_for_previous(PDL)
    start, stop = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    w_rows = w_ptr + columns[:, None] * width
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
        if HALF:
            out *= 1 / _SHRUNK
        out *= tl.load(weights_ptr + pairs, mask=live, other=0.0).to(tl.float32)[:, None]
        part_rows = part_ptr + pairs.to(tl.int64)[:, None] * hidden + columns[None, :]
        tl.store(part_rows, out.to(part_ptr.dtype.element_ty), mask=live[:, None] & wide[None, :])
