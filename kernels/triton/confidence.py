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
from diffray.kernels.kernel import Kernel, Tile
from diffray.kernels.numeric_errors import confidence_error
from diffray.kernels.triton.launch import overlapped, prefetch_rows, staged, wait_for_previous
from diffray.kernels.triton.vocab_tiles import Parts, join, keep

_MOST_FUSED = 128  # rows of the largest tile; for more the head would be read again
_ROWS_STORED, _ROWS_AT_ONCE, _LOGITS = 512, 4, 1024


def confidence(
    hidden_RH: Tensor,
    head_VH: Tensor,
    start: int,
    forbidden: int,
    gather_RK: Tensor,
    draw: Draw | None,
    *,
    pdl: bool = False,
) -> Confidence:
    """Return each row's choice among the ids [start, start + V); the forbidden id is never chosen.

    Logits are rounded to the dtype of the head, as if they had been stored.
    """
    if len(hidden_RH) > _MOST_FUSED and hidden_RH.element_size() <= 2 and draw is None:
        return confidence_after_product(hidden_RH, head_VH, start, forbidden, gather_RK, pdl=pdl)
    hidden_RH, head_VH = hidden_RH.contiguous(), head_VH.contiguous()
    rows, hidden = hidden_RH.shape
    size = head_VH.shape[0]
    tile = _tile_for(rows, hidden_RH.element_size(), drawn=draw is not None)
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
            **staged(tile),
            **overlapped(pdl),
        )
    return join(parts, gathered_RK, start, pdl=pdl)


def confidence_after_product(
    hidden_RH: Tensor,
    head_VH: Tensor,
    start: int,
    forbidden: int,
    gather_RK: Tensor,
    *,
    pdl: bool = False,
) -> Confidence:
    """Return the best of each row, storing the logits of a few hundred rows at a time."""
    rows, size = len(hidden_RH), len(head_VH)
    parts = Parts.empty(triton.cdiv(size, _LOGITS), rows, hidden_RH.device)
    gathered_RK = torch.zeros(gather_RK.shape, dtype=torch.float32, device=hidden_RH.device)
    for first in range(0, rows, _ROWS_STORED):
        logits_RV = linear(hidden_RH[first : first + _ROWS_STORED], head_VH)
        _weigh_logits[(triton.cdiv(len(logits_RV), _ROWS_AT_ONCE), triton.cdiv(size, _LOGITS))](
            logits_RV,
            *parts,
            gather_RK.contiguous(),
            gathered_RK,
            rows,
            first,
            size,
            start,
            forbidden,
            GATHERED=gather_RK.shape[1],
            ROWS=_ROWS_AT_ONCE,
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


CONFIDENCE: Final = Kernel(
    "confidence",
    reference.confidence,
    confidence,
    error=confidence_error,
    tolerance=0.25,  # logits are rounded once
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
    rows,
    first,
    size,
    start,
    forbidden,
    GATHERED: tl.constexpr,
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
        None,
        None,
        rows,
        size,
        start,
        forbidden,
        GATHERED,
        False,
    )
