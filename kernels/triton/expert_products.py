"""The two products of gated experts in Triton: tiles, and the programs that compute them.

Tiles of the same columns run side by side, so weights are read from memory once. A program computes
one tile or, if it is persistent (`stay`), one after the other.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: up
rows, then gate rows), K experts of a token, S token-expert pairs (T * K).
"""

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels.router import Pairs
from diffray.kernels.triton.expert_tiles import down_tile, gate_up_tile, tile_of
from diffray.kernels.triton.float8_rows import round_rows
from diffray.kernels.triton.launch import (
    can_fetch,
    num_programs,
    overlapped,
    prefetch_rows,
    wait_for_previous,
)
from diffray.kernels.variants import Tile

# Bytes of gate and up weights that persistent programs fetch before the router has ended: three
# fifths of an H100's L2 cache. Weights of the down matrix would be evicted before their use.
_AHEAD: Final = 30_000_000
AHEAD_S: Final = 7e-6  # what that may save


def multiply_pairs(
    x_TH: Tensor,
    w31_EFH: Tensor,
    scale31_EF: Tensor | None,
    w2_EHI: Tensor,
    scale2_EH: Tensor | None,
    weights_TK: Tensor,
    pairs: Pairs,
    tile: Tile,
    *,
    half: bool = False,
    stay: bool = False,
    rounded: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Return each pair's weighted output [S, H]; those of other ranks' experts are undefined.

    `rounded` rounds the activations between the products to float8 rows. `half` multiplies in
    float16, because bytes convert to float16 in fewer instructions than to bfloat16. Programs that
    `stay` are persistent: they share the tiles equally, and fetch weights ahead.
    """
    num_experts, hidden, width = w2_EHI.shape
    num_pairs = weights_TK.numel()
    # Row tiles of an expert run side by side; in sequence each would read its weights again.
    lanes = triton.cdiv(fullest(num_pairs / num_experts), tile.rows)
    kind = torch.float16 if half else x_TH.dtype
    mid_SI = torch.empty(num_pairs, width, dtype=kind, device=x_TH.device)
    tiles, programs = _tiles(lanes * num_experts, width, tile, stay, x_TH.device)
    _gate_up[(programs,)](
        x_TH.contiguous(),
        w31_EFH,
        scale31_EF,
        mid_SI,
        *pairs,
        hidden,
        width,
        lanes,
        tiles,
        CHOSEN=weights_TK.shape[1],
        HALF=half,
        SCALED=scale31_EF is not None,
        AHEAD=_ahead(tile, w31_EFH, programs) if stay else tile.depth,
        **_launch(tile, stay, pdl),
    )
    if rounded:
        mid_SI = round_rows(mid_SI, pdl=pdl)
    part_SH = x_TH.new_empty(num_pairs, hidden)
    tiles, programs = _tiles(lanes * num_experts, hidden, tile, stay, x_TH.device)
    _down[(programs,)](
        mid_SI,
        w2_EHI,
        scale2_EH,
        weights_TK.contiguous(),
        part_SH,
        *pairs,
        hidden,
        width,
        lanes,
        tiles,
        HALF=half,
        SCALED=scale2_EH is not None,
        **_launch(tile, stay, pdl),
    )
    return part_SH


def _tiles(
    blocks: int, columns: int, tile: Tile, stay: bool, device: torch.device
) -> tuple[int, int]:
    """Return how many tiles these blocks of rows have, and how many programs compute them."""
    tiles = blocks * triton.cdiv(columns, tile.columns)
    return tiles, num_programs(tiles, device) if stay else tiles


def _ahead(tile: Tile, w31_EFH: Tensor, programs: int) -> int:
    """Return how much of its first rows each program fetches before the previous kernel ends."""
    line = 128 // w31_EFH.element_size()
    lines = _AHEAD // (128 * 2 * tile.columns * programs)
    return min(max(lines * line, tile.depth), w31_EFH.shape[2])


def _launch(tile: Tile, stay: bool, pdl: bool) -> dict[str, Any]:
    """Return the launch options of both products."""
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "STAY": stay,
        "FETCH": stay and can_fetch(),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **overlapped(pdl),
    }


def fullest(rows_per_expert: float) -> int:
    """Return a number of rows that nearly no expert exceeds.

    Tokens spread over experts almost at random; the fullest is some deviations above the mean.
    """
    return max(math.ceil(rows_per_expert + 4 * math.sqrt(rows_per_expert)), 1)


@triton.jit
def _fetch_gate_up(
    w_ptr,
    tile,
    hidden,
    width,
    lanes,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    FETCH: tl.constexpr,
):
    """Bring the first weights of a tile to the L2 cache."""
    expert, columns, _ = tile_of(tile, lanes, width, COLUMNS)
    w_ptr += expert * (2 * width * hidden)
    prefetch_rows(w_ptr, columns, width, hidden, DEPTH, FETCH)
    prefetch_rows(w_ptr + width * hidden, columns, width, hidden, DEPTH, FETCH)


@triton.jit(do_not_specialize=["lanes", "tiles"])
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
    tiles,
    CHOSEN: tl.constexpr,
    HALF: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    STAY: tl.constexpr,
    FETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write silu(gate) * up of some columns of one expert, for all its pairs; tile after tile."""
    first, step = tl.program_id(0), tl.num_programs(0) if STAY else 1
    _fetch_gate_up(w_ptr, first, hidden, width, lanes, COLUMNS, AHEAD, PDL)
    wait_for_previous(PDL)
    for tile in range(first, tiles if STAY else first + 1, step):
        after = tl.minimum(tile + step, tiles - 1)
        _fetch_gate_up(w_ptr, after, hidden, width, lanes, COLUMNS, DEPTH, FETCH)
        expert, columns, lane = tile_of(tile, lanes, width, COLUMNS)
        gate_up_tile(
            x_ptr,
            w_ptr + expert * (2 * width * hidden),
            scale_ptr + expert * 2 * width if SCALED else scale_ptr,
            mid_ptr,
            starts_ptr + expert,
            order_ptr,
            hidden,
            width,
            columns,
            lane,
            lanes,
            CHOSEN,
            HALF,
            SCALED,
            ROWS,
            COLUMNS,
            DEPTH,
        )


@triton.jit
def _fetch_down(
    w_ptr,
    tile,
    hidden,
    width,
    lanes,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    FETCH: tl.constexpr,
):
    """Bring the first weights of a tile to the L2 cache."""
    expert, columns, _ = tile_of(tile, lanes, hidden, COLUMNS)
    prefetch_rows(w_ptr + expert * (hidden * width), columns, hidden, width, DEPTH, FETCH)


@triton.jit(do_not_specialize=["lanes", "tiles"])
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
    tiles,
    HALF: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAY: tl.constexpr,
    FETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write some columns of one expert's weighted output, one row per pair; tile after tile."""
    first, step = tl.program_id(0), tl.num_programs(0) if STAY else 1
    _fetch_down(w_ptr, first, hidden, width, lanes, COLUMNS, DEPTH, PDL)
    wait_for_previous(PDL)
    for tile in range(first, tiles if STAY else first + 1, step):
        after = tl.minimum(tile + step, tiles - 1)
        _fetch_down(w_ptr, after, hidden, width, lanes, COLUMNS, DEPTH, FETCH)
        expert, columns, lane = tile_of(tile, lanes, hidden, COLUMNS)
        down_tile(
            mid_ptr,
            w_ptr + expert * (hidden * width),
            scale_ptr + expert * hidden if SCALED else scale_ptr,
            weights_ptr,
            part_ptr,
            starts_ptr + expert,
            order_ptr,
            hidden,
            width,
            columns,
            lane,
            lanes,
            HALF,
            SCALED,
            ROWS,
            COLUMNS,
            DEPTH,
        )
