"""Summaries of logit rows per tile of the vocabulary, and their combination.

Letters: R rows, K gathered ids, N tiles of the vocabulary.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels.confidence import Confidence
from diffray.kernels.triton.launch import overlapped, wait_for_previous
from diffray.kernels.triton.noise import gumbel


class Parts(NamedTuple):
    """The summary of each row in each tile of the vocabulary."""

    score_NR: Tensor
    id_NR: Tensor
    logit_NR: Tensor
    best_NR: Tensor
    top_NR: Tensor
    mass_NR: Tensor

    @staticmethod
    def empty(tiles: int, rows: int, device: torch.device) -> "Parts":
        def part(dtype: torch.dtype) -> Tensor:
            return torch.empty(tiles, rows, dtype=dtype, device=device)

        wide = torch.float32
        return Parts(part(wide), part(torch.int32), *(part(wide) for _ in range(4)))


def join(parts: Parts, gathered_RK: Tensor, start: int, *, pdl: bool = False) -> Confidence:
    """Combine the summaries of all tiles."""
    tiles, rows = parts.id_NR.shape
    device = parts.id_NR.device
    ids_R = torch.empty(rows, dtype=torch.long, device=device)
    score_R, logit_R, best_R, lse_R = torch.empty(4, rows, dtype=torch.float32, device=device)
    if rows:
        _join_tiles[(rows,)](
            *parts,
            ids_R,
            score_R,
            logit_R,
            best_R,
            lse_R,
            rows,
            tiles,
            start,
            BLOCK=triton.next_power_of_2(tiles),
            num_warps=4,
            **overlapped(pdl),
        )
    return Confidence(ids_R, score_R, logit_R, best_R, lse_R, gathered_RK)


@triton.jit
def keep(
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
    GATHERED: tl.constexpr,
    DRAWN: tl.constexpr,
):
    """Write the summary of a tile of logits; columns out of range hold -inf."""
    live = row < rows
    low = tl.min(column, axis=0)
    high = tl.minimum(tl.max(column, axis=0) + 1, size)
    for k in range(GATHERED):
        asked = tl.load(gather_ptr + row * GATHERED + k, mask=live, other=-1) - start
        here = live & (asked >= low) & (asked < high)
        if tl.max(here.to(tl.int32), axis=0) > 0:
            found = tl.where(column[None, :] == asked[:, None], logits, 0.0)
            tl.store(gathered_ptr + row * GATHERED + k, tl.sum(found, axis=1), mask=here)

    top = tl.max(logits, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(tl.exp(logits - base[:, None]), axis=1)

    allowed = tl.where(column[None, :] + start == forbidden, float("-inf"), logits)
    scores = allowed
    if DRAWN:
        hot = tl.load(temperature_ptr + row, mask=live, other=0.0)
        if tl.max(hot, axis=0) > 0.0:
            key = tl.load(key_ptr + row, mask=live, other=0).to(tl.uint32)
            drawn = gumbel(key[:, None], (column + start).to(tl.uint32)[None, :])
            divisor = tl.where(hot > 0.0, hot, 1.0)[:, None]
            tempered = tl.div_rn(allowed, tl.broadcast_to(divisor, allowed.shape)) + drawn
            scores = tl.where(hot[:, None] > 0.0, tempered, allowed)
    score, index = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
    own = low + index
    # A tile without an allowed id names its first id with -inf, which loses to any other.
    logit = tl.sum(tl.where(column[None, :] == own[:, None], logits, 0.0), axis=1)

    place = tl.program_id(1) * rows + row
    tl.store(score_ptr + place, score, mask=live)
    tl.store(best_ptr + place, tl.max(allowed, axis=1), mask=live)
    tl.store(id_ptr + place, own, mask=live)
    tl.store(logit_ptr + place, logit, mask=live)
    tl.store(top_ptr + place, top, mask=live)
    tl.store(mass_ptr + place, mass, mask=live)


@triton.jit(do_not_specialize=["rows"])
def _join_tiles(
    score_ptr,
    id_ptr,
    logit_ptr,
    best_ptr,
    top_ptr,
    mass_ptr,
    ids_ptr,
    joined_score_ptr,
    joined_logit_ptr,
    joined_best_ptr,
    lse_ptr,
    rows,
    tiles,
    start,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine a row's tiles; they are in id order, so the lowest id wins on ties."""
    wait_for_previous(PDL)
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
    joined, winner = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(joined_score_ptr + row, joined)
    tl.store(joined_logit_ptr + row, tl.load(logit_ptr + winner * rows + row))
    best = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    tl.store(joined_best_ptr + row, tl.max(best, axis=0))
    tl.store(ids_ptr + row, tl.load(id_ptr + winner * rows + row).to(tl.int64) + start)
