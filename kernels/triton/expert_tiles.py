"""The two products of gated experts in Triton, a program for each tile.

A tile is some columns of one expert and some of its rows. If the expert has more rows than
expected, the tile continues with further rows. There are no atomic additions: the same pairs give
the same bits, whatever else is in the batch.
"""

import triton
import triton.language as tl

from diffray.kernels.triton.launch import prefetch_rows, wait_for_previous

# Activations between the products can exceed float16's range, a norm's output hardly ever.
_SHRUNK = tl.constexpr(2.0**-5)


@triton.jit
def tile_of(tile, lanes, size, COLUMNS: tl.constexpr):
    """Return a tile's expert, its columns, and its lane of rows."""
    block = tile // lanes
    blocks = tl.cdiv(size, COLUMNS)
    columns = block % blocks * COLUMNS + tl.arange(0, COLUMNS)
    return (block // blocks).to(tl.int64), columns, tile % lanes


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
    expert, columns, lane = tile_of(tl.program_id(0), lanes, width, COLUMNS)
    w_ptr += expert * (2 * width * hidden)
    prefetch_rows(w_ptr, columns, width, hidden, DEPTH, PDL)
    prefetch_rows(w_ptr + width * hidden, columns, width, hidden, DEPTH, PDL)
    wait_for_previous(PDL)
    start, stop = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    wide = columns < width
    up_ptr = w_ptr + columns[:, None] * hidden
    gate_ptr = up_ptr + width * hidden
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
                x = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
            here = wide[:, None] & inside[None, :]
            gate_w = tl.load(gate_ptr + at[None, :], mask=here, other=0.0).to(x.dtype)
            up_w = tl.load(up_ptr + at[None, :], mask=here, other=0.0).to(x.dtype)
            gate = tl.dot(x, tl.trans(gate_w), gate, input_precision="ieee")
            up = tl.dot(x, tl.trans(up_w), up, input_precision="ieee")
        if SCALED:
            scales = scale_ptr + expert * 2 * width
            up *= tl.load(scales + columns, mask=wide, other=0.0)[None, :]
            gate *= tl.load(scales + width + columns, mask=wide, other=0.0)[None, :]
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
    expert, columns, lane = tile_of(tl.program_id(0), lanes, hidden, COLUMNS)
    w_ptr += expert * (hidden * width)
    prefetch_rows(w_ptr, columns, hidden, width, DEPTH, PDL)
    wait_for_previous(PDL)
    start, stop = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    wide = columns < hidden
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
            out *= tl.load(scale_ptr + expert * hidden + columns, mask=wide, other=0.0)[None, :]
        if HALF:
            out *= 1 / _SHRUNK
        out *= tl.load(weights_ptr + pairs, mask=live, other=0.0).to(tl.float32)[:, None]
        part_rows = part_ptr + pairs.to(tl.int64)[:, None] * hidden + columns[None, :]
        tl.store(part_rows, out.to(part_ptr.dtype.element_ty), mask=live[:, None] & wide[None, :])
