"""From hidden states to tokens and their confidence in Triton, without writing the logits.

A program multiplies some rows with a tile of the head, and keeps of the tile's logits what a row
needs: the best score, its id and logit, the largest logit, the mass. A second kernel joins the
tiles. The head is read once for as many rows as fit a tile.

Letters: R rows, H hidden size, V this rank's vocabulary, K gathered ids, N tiles of the vocabulary.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels import noise
from diffray.kernels.triton.reference import Confidence, Draw


class _Parts(NamedTuple):
    """What each tile of the vocabulary has to say about each row."""

    score_NR: Tensor
    id_NR: Tensor
    logit_NR: Tensor
    top_NR: Tensor
    mass_NR: Tensor

    @staticmethod
    def empty(tiles: int, rows: int, device: torch.device) -> "_Parts":
        def part(dtype: torch.dtype) -> Tensor:
            return torch.empty(tiles, rows, dtype=dtype, device=device)

        wide = torch.float32
        return _Parts(part(wide), part(torch.int32), part(wide), part(wide), part(wide))


def confidence(
    hidden_RH: Tensor,
    head_VH: Tensor,
    start: int,
    forbidden: int,
    gather_RK: Tensor,
    draw: Draw | None,
) -> Confidence:
    """Return each row's choice among the ids [start, start + V); the forbidden id is never chosen.

    Logits are rounded to the dtype of the head, as if they had been written.
    """
    rows, hidden = hidden_RH.shape
    size = head_VH.shape[0]
    narrow = hidden_RH.element_size() <= 2  # exact float32 has no matrix units: small tiles do
    tile = min(max(triton.next_power_of_2(rows), 16), 128 if narrow else 32)
    # Noise is made in float64, for which a larger tile has no registers.
    columns = 128 if draw is None and narrow else 64
    parts = _Parts.empty(triton.cdiv(size, columns), rows, hidden_RH.device)
    gathered_RK = torch.zeros(gather_RK.shape, dtype=torch.float32, device=hidden_RH.device)
    if rows:
        _weigh_head[(triton.cdiv(rows, tile), triton.cdiv(size, columns))](
            hidden_RH.contiguous(),
            head_VH.contiguous(),
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
            ROWS=tile,
            COLUMNS=columns,
            DEPTH=64 if narrow else 32,
            num_warps=8 if tile == 128 or (tile == 64 and draw is not None) else 4,
            num_stages=4 if narrow else 2,
        )
    return _join(parts, gathered_RK, start)


def confidence_of_logits(
    logits_RV: Tensor, start: int, forbidden: int, gather_RK: Tensor, draw: Draw | None
) -> Confidence:
    """Return the same as `confidence`, of logits that have been written; they are only read."""
    rows, size = logits_RV.shape
    columns = min(triton.next_power_of_2(size), 4096)
    parts = _Parts.empty(triton.cdiv(size, columns), rows, logits_RV.device)
    gathered_RK = torch.zeros(gather_RK.shape, dtype=torch.float32, device=logits_RV.device)
    if rows:
        _weigh_logits[(rows, triton.cdiv(size, columns))](
            logits_RV.contiguous(),
            *parts,
            gather_RK.contiguous(),
            gathered_RK,
            *_noise_of(draw),
            rows,
            size,
            start,
            forbidden,
            GATHERED=gather_RK.shape[1],
            DRAWN=draw is not None,
            COLUMNS=columns,
            num_warps=8,
        )
    return _join(parts, gathered_RK, start)


def _noise_of(draw: Draw | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the rows' temperatures and the keys of their noise."""
    if draw is None:
        return None, None
    key_R = noise.key(draw.seed_R, draw.position_R, draw.step_R)
    return draw.temperature_R.float().contiguous(), key_R.contiguous()


def _join(parts: _Parts, gathered_RK: Tensor, start: int) -> Confidence:
    """Join what the tiles of the vocabulary say."""
    tiles, rows = parts.id_NR.shape
    device = parts.id_NR.device
    ids_R = torch.empty(rows, dtype=torch.long, device=device)
    score_R, logit_R, lse_R = torch.empty(3, rows, dtype=torch.float32, device=device)
    if rows:
        _join_tiles[(rows,)](
            *parts,
            ids_R,
            score_R,
            logit_R,
            lse_R,
            rows,
            tiles,
            start,
            BLOCK=triton.next_power_of_2(tiles),
            num_warps=4,
        )
    return Confidence(ids_R, score_R, logit_R, lse_R, gathered_RK)


@triton.jit
def _mix(x):
    """Hash 32 bits, as `noise.mix` does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(key, ids):
    """Return `noise.gumbel` of keys and ids: the same integers, then logarithms in float64."""
    hashed = _mix(key + _mix(ids * 0x9E3779B9 + 1))
    unit = (hashed.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(unit))).to(tl.float32)


@triton.jit
def _keep(
    logits,
    row,
    column,
    score_ptr,
    id_ptr,
    logit_ptr,
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
    GATHERED: tl.constexpr,
    DRAWN: tl.constexpr,
):
    """Write what a tile of logits says about its rows; columns out of range hold -inf."""
    live = row < rows
    low = tl.min(column, axis=0)
    high = tl.minimum(tl.max(column, axis=0) + 1, size)
    for k in tl.static_range(GATHERED):
        asked = tl.load(gather_ptr + row * GATHERED + k, mask=live, other=-1) - start
        here = live & (asked >= low) & (asked < high)
        if tl.max(here.to(tl.int32), axis=0) > 0:
            found = tl.where(column[None, :] == asked[:, None], logits, 0.0)
            tl.store(gathered_ptr + row * GATHERED + k, tl.sum(found, axis=1), mask=here)

    top = tl.max(logits, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(tl.exp(logits - base[:, None]), axis=1)

    scores = logits
    if DRAWN:
        hot = tl.load(temperature_ptr + row, mask=live, other=0.0)
        if tl.max(hot, axis=0) > 0.0:
            key = tl.load(key_ptr + row, mask=live, other=0).to(tl.uint32)
            drawn = _gumbel(key[:, None], (column + start).to(tl.uint32)[None, :])
            divisor = tl.where(hot > 0.0, hot, 1.0)[:, None]
            tempered = tl.div_rn(logits, tl.broadcast_to(divisor, logits.shape)) + drawn
            scores = tl.where(hot[:, None] > 0.0, tempered, logits)
    scores = tl.where(column[None, :] + start == forbidden, float("-inf"), scores)
    best, index = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
    own = low + index
    # A tile in which nothing may be chosen names its first id, at -inf; it loses to any other.
    logit = tl.sum(tl.where(column[None, :] == own[:, None], logits, 0.0), axis=1)

    place = tl.program_id(1) * rows + row
    tl.store(score_ptr + place, best, mask=live)
    tl.store(id_ptr + place, own, mask=live)
    tl.store(logit_ptr + place, logit, mask=live)
    tl.store(top_ptr + place, top, mask=live)
    tl.store(mass_ptr + place, mass, mask=live)


@triton.jit
def _weigh_head(
    hidden_ptr,
    head_ptr,
    score_ptr,
    id_ptr,
    logit_ptr,
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
):
    """Multiply some rows with a tile of the head and keep what matters."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, wide = row < rows, column < size
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
    _keep(
        logits,
        row,
        column,
        score_ptr,
        id_ptr,
        logit_ptr,
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


@triton.jit
def _weigh_logits(
    logits_ptr,
    score_ptr,
    id_ptr,
    logit_ptr,
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
    GATHERED: tl.constexpr,
    DRAWN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Read a tile of one row of logits and keep what matters."""
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * size + column[None, :]
    logits = tl.load(logits_ptr + at, mask=(column < size)[None, :], other=float("-inf"))
    _keep(
        logits.to(tl.float32),
        row,
        column,
        score_ptr,
        id_ptr,
        logit_ptr,
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


@triton.jit
def _join_tiles(
    score_ptr,
    id_ptr,
    logit_ptr,
    top_ptr,
    mass_ptr,
    ids_ptr,
    best_ptr,
    best_logit_ptr,
    lse_ptr,
    rows,
    tiles,
    start,
    BLOCK: tl.constexpr,
):
    """Join a row's tiles; they stand in the order of their ids, so of equals the lowest wins."""
    row = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    at = tile * rows + row
    inside = tile < tiles
    top = tl.load(top_ptr + at, mask=inside, other=float("-inf"))
    peak = tl.max(top, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.load(mass_ptr + at, mask=inside, other=0.0) * tl.exp(top - base)
    tl.store(lse_ptr + row, base + tl.log(tl.sum(mass, axis=0)))

    score = tl.load(score_ptr + at, mask=inside, other=float("-inf"))
    best, winner = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + row, best)
    tl.store(best_logit_ptr + row, tl.load(logit_ptr + winner * rows + row))
    tl.store(ids_ptr + row, tl.load(id_ptr + winner * rows + row).to(tl.int64) + start)
