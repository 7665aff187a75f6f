"""Chooses tokens and their confidence from hidden states in Triton, without storing the logits.

A program multiplies some rows with a tile of the head and summarizes each row's logits: the best
score, its id and logit, the largest logit, the mass. A second kernel combines the tiles. The head
is read once for as many rows as fit a tile. For many rows torch's product may be faster, followed
by a pass over the logits of some rows at a time.

Letters: R rows, H hidden size, V this rank's vocabulary, K gathered ids.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from diffray.kernels import confidence as reference
from diffray.kernels import noise
from diffray.kernels.confidence import Confidence, Draw
from diffray.kernels.numeric_errors import confidence_error
from diffray.kernels.triton.launch import (
    overlapped,
    prefetch_rows,
    tiled_variants,
    variants_of,
    wait_for_previous,
)
from diffray.kernels.triton.vocab_tiles import Parts, join, keep
from diffray.kernels.variants import Kernel, Shape, Tile, Variant, rounded_up

_MANY_ROWS = 256  # from here on a tile of the fused product reads too much for what it computes
_ROWS_STORED, _LOGITS = 512, 1024


def confidence(
    hidden_RH: Tensor,
    head_VH: Tensor,
    start: int,
    forbidden: int,
    gather_RK: Tensor,
    draw: Draw | None,
    tile: Tile | None = None,
    *,
    pdl: bool = False,
) -> Confidence:
    """Return each row's choice among the ids [start, start + V); the forbidden id is never chosen.

    Logits are rounded to the dtype of the head, as if they had been stored.
    """
    hidden_RH, head_VH = hidden_RH.contiguous(), head_VH.contiguous()
    rows, hidden = hidden_RH.shape
    size = head_VH.shape[0]
    tile = tile or _tile_for(rows, hidden_RH.element_size(), drawn=draw is not None)
    parts = Parts.empty(triton.cdiv(size, tile.columns), rows, hidden_RH.device)
    gathered_RK = torch.zeros(gather_RK.shape, dtype=torch.float32, device=hidden_RH.device)
    if rows:
        _weigh_head[(triton.cdiv(rows, tile.rows), triton.cdiv(size, tile.columns))](
            hidden_RH,
            head_VH,
            *parts,
            gather_RK.contiguous(),
            gathered_RK,
            *_noise_of(draw),
            rows,
            hidden,
            size,
            start,
            forbidden,
            GATHERED=gather_RK.shape[1],
            DRAWN=draw is not None,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **overlapped(pdl),
        )
    return join(parts, gathered_RK, start, pdl=pdl)


def confidence_after_product(
    hidden_RH: Tensor,
    head_VH: Tensor,
    start: int,
    forbidden: int,
    gather_RK: Tensor,
    draw: Draw | None,
    *,
    pdl: bool = False,
) -> Confidence:
    """Return the same as `confidence`, storing the logits of a few hundred rows at a time."""
    rows, size = len(hidden_RH), len(head_VH)
    parts = Parts.empty(triton.cdiv(size, _LOGITS), rows, hidden_RH.device)
    gathered_RK = torch.zeros(gather_RK.shape, dtype=torch.float32, device=hidden_RH.device)
    noise_of_rows = _noise_of(draw)
    at_once = 1 if draw is not None else 4  # noise takes many registers
    for first in range(0, rows, _ROWS_STORED):
        logits_RV = linear(hidden_RH[first : first + _ROWS_STORED], head_VH)
        _weigh_logits[(triton.cdiv(len(logits_RV), at_once), triton.cdiv(size, _LOGITS))](
            logits_RV,
            *parts,
            gather_RK.contiguous(),
            gathered_RK,
            *noise_of_rows,
            rows,
            first,
            size,
            start,
            forbidden,
            GATHERED=gather_RK.shape[1],
            DRAWN=draw is not None,
            ROWS=at_once,
            COLUMNS=_LOGITS,
            num_warps=4,
            **overlapped(pdl),
        )
    return join(parts, gathered_RK, start, pdl=pdl)


def _noise_of(draw: Draw | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the rows' temperatures and the keys of their noise."""
    if draw is None:
        return None, None
    key_R = noise.key(draw.seed_R, draw.position_R, draw.step_R)
    return draw.temperature_R.float().contiguous(), key_R.contiguous()


def _tile_for(rows: int, itemsize: int, *, drawn: bool) -> Tile:
    if itemsize > 2:  # exact float32 uses no matrix units, so small tiles suffice
        return Tile(min(max(triton.next_power_of_2(rows), 16), 32), 64, 32, 4, 2)
    tile = min(max(triton.next_power_of_2(rows), 16), 128)
    # Noise is computed in float64; a larger tile would run out of registers.
    warps = 8 if tile == 128 or (tile == 64 and drawn) else 4
    return Tile(tile, 64 if drawn else 128, 64, warps, 4)


def _variants(
    hidden_RH: Tensor,
    _head_VH: Tensor,
    _start: int,
    _forbidden: int,
    _gather_RK: Tensor,
    draw: Draw | None,
) -> list[Variant]:
    """Return the program that reads the head once, or first torch's product for many rows."""
    rows, itemsize = rounded_up(len(hidden_RH)), hidden_RH.element_size()
    found = tiled_variants([_tile_for(rows, itemsize, drawn=draw is not None)], confidence)
    if itemsize > 2 or rows < _MANY_ROWS:
        return found
    product = variants_of(confidence_after_product, "triton after product")
    return [*found, *product] if draw is not None else [*product, *found]


def _shape(
    hidden_RH: Tensor,
    head_VH: Tensor,
    _start: int,
    _forbidden: int,
    gather_RK: Tensor,
    draw: Draw | None,
) -> Shape:
    kinds = str(head_VH.dtype), "best" if draw is None else "drawn"
    sizes = rounded_up(len(hidden_RH)), rounded_up(gather_RK.shape[1])
    return Shape((*head_VH.shape, *kinds), sizes)


CONFIDENCE: Final = Kernel(
    "confidence",
    reference.confidence,
    _shape,
    _variants,
    error=confidence_error,
    tolerance=0.25,  # logits are rounded once
    recordable=lambda *args: args[-1] is None,  # which rows draw is found on the host
)


@triton.jit(do_not_specialize=["rows"])
def _weigh_head(
    hidden_ptr,
    head_ptr,
    score_ptr,
    id_ptr,
    logit_ptr,
    best_ptr,
    top_ptr,
    mass_ptr,
    gather_ptr,
    gathered_ptr,
    temperature_ptr,
    key_ptr,
    rows,
    hidden,
    size,
    start,
    forbidden,
    GATHERED: tl.constexpr,
    DRAWN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply some rows with a tile of the head and keep a summary."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, wide = row < rows, column < size
    prefetch_rows(head_ptr, column.to(tl.int64), size, hidden, DEPTH, PDL)
    wait_for_previous(PDL)
    x_rows = hidden_ptr + row.to(tl.int64)[:, None] * hidden
    w_rows = head_ptr + column.to(tl.int64)[:, None] * hidden
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for deep in range(0, hidden, DEPTH):
        at = deep + tl.arange(0, DEPTH)
        inside = (at < hidden)[None, :]
        x = tl.load(x_rows + at[None, :], mask=live[:, None] & inside, other=0.0)
        w = tl.load(w_rows + at[None, :], mask=wide[:, None] & inside, other=0.0)
        logits = tl.dot(x, tl.trans(w), logits, input_precision="ieee")
    logits = logits.to(head_ptr.dtype.element_ty).to(tl.float32)
    logits = tl.where(wide[None, :], logits, float("-inf"))
    keep(
        logits,
        row,
        column,
        score_ptr,
        id_ptr,
        logit_ptr,
        best_ptr,
        top_ptr,
        mass_ptr,
        gather_ptr,
        gathered_ptr,
        temperature_ptr,
        key_ptr,
        rows,
        size,
        start,
        forbidden,
        GATHERED,
        DRAWN,
    )


@triton.jit(do_not_specialize=["rows", "first"])
def _weigh_logits(
    logits_ptr,
    score_ptr,
    id_ptr,
    logit_ptr,
    best_ptr,
    top_ptr,
    mass_ptr,
    gather_ptr,
    gathered_ptr,
    temperature_ptr,
    key_ptr,
    rows,
    first,
    size,
    start,
    forbidden,
    GATHERED: tl.constexpr,
    DRAWN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keep a summary of a tile of stored logits, of which the first row is row `first`."""
    wait_for_previous(PDL)
    stored = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = first + stored
    at = logits_ptr + stored.to(tl.int64)[:, None] * size + column[None, :]
    here = (row < rows)[:, None] & (column < size)[None, :]
    logits = tl.load(at, mask=here, other=float("-inf")).to(tl.float32)
    keep(
        logits,
        row,
        column,
        score_ptr,
        id_ptr,
        logit_ptr,
        best_ptr,
        top_ptr,
        mass_ptr,
        gather_ptr,
        gathered_ptr,
        temperature_ptr,
        key_ptr,
        rows,
        size,
        start,
        forbidden,
        GATHERED,
        DRAWN,
    )
