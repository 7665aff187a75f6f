"""`reward` in Triton: one program for each row of the head, compiled once for blocks of up to 64.

Letters: R rows of the head, B rows of blocks, L positions of the longest block, K ids remembered of
a position.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels import credit
from diffray.kernels.confidence import Confidence
from diffray.kernels.credit import Credits
from diffray.kernels.kernel import Kernel
from diffray.kernels.triton.launch import overlapped, wait_for_previous

_FEWEST: Final = 64  # ids that a program has room for, at least


def reward(
    found: Confidence,
    credits: Credits,
    cells_R: Tensor,
    masked_BL: Tensor,
    mask_token_id: int,
    *,
    pdl: bool = False,
) -> Confidence:
    """Return what `confidence` would find with credit added to the logits; no row draws."""
    rows, gathered_RK = len(cells_R), found.gathered_RK
    ids_BLK, credit_BLK = credits.memory
    size = max(triton.next_power_of_2(ids_BLK.shape[2]), _FEWEST)
    ids_R = torch.empty_like(found.ids_R)
    best_R, lse_R, mask_R = (torch.empty_like(found.best_R) for _ in range(3))
    if rows:
        _reward_row[(rows,)](
            found.ids_R,
            found.best_R,
            found.logsumexp_R,
            gathered_RK,
            *gathered_RK.stride(),
            cells_R,
            masked_BL,
            ids_BLK,
            credit_BLK,
            *credits.gains,
            ids_R,
            best_R,
            lse_R,
            mask_R,
            *ids_BLK.shape[1:],
            mask_token_id,
            SIZE=size,
            num_warps=max(size // 128, 1),
            **overlapped(pdl),
        )
    return Confidence(ids_R, best_R, best_R, best_R, lse_R, mask_R.unsqueeze(1))


REWARD: Final = Kernel(
    "reward",
    credit.reward,
    reward,
    written=lambda _found, credits, *_: credits.memory,
    precision=lambda *_: torch.float32,
)


# Neither an odd number of rows nor another block length may cause another compilation.
@triton.jit(
    do_not_specialize=["row_stride", "id_stride", "length", "known", "mask_token_id"],
    do_not_specialize_on_alignment=[
        "ids_ptr",
        "best_ptr",
        "lse_ptr",
        "gathered_ptr",
        "cells_ptr",
        "alpha_ptr",
        "gamma_ptr",
        "decay_ptr",
    ],
)
def _reward_row(
    ids_ptr,
    best_ptr,
    lse_ptr,
    gathered_ptr,
    row_stride,
    id_stride,
    cells_ptr,
    masked_ptr,
    known_ids_ptr,
    credit_ptr,
    alpha_ptr,
    gamma_ptr,
    decay_ptr,
    new_ids_ptr,
    new_best_ptr,
    new_lse_ptr,
    new_mask_ptr,
    length,
    known,
    mask_token_id,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, SIZE)
    inside = at < known
    cell = tl.load(cells_ptr + row)
    block = cell // length
    place = cell * known + at
    old_ids = tl.load(known_ids_ptr + place, mask=inside, other=-1)
    credit = tl.load(credit_ptr + place, mask=inside, other=0.0)
    gathered_row = gathered_ptr + row * row_stride
    gathered = tl.load(gathered_row + (at + 1) * id_stride, mask=inside, other=0.0)
    mask_logit = tl.load(gathered_row)
    best_id = tl.load(ids_ptr + row)
    best = tl.load(best_ptr + row)
    lse = tl.load(lse_ptr + row)
    decay = tl.load(decay_ptr + block)
    gains = (tl.load(masked_ptr + cell) != 0) & (decay >= 0)

    # The top id gains; ties go to the lowest.
    top = tl.maximum(best, mask_logit)
    mask_on_top = (mask_logit > best) | ((mask_logit == top) & (mask_token_id < best_id))
    top_id = tl.where(mask_on_top, mask_token_id, best_id)
    is_top = old_ids == top_id
    first = tl.min(tl.where(inside & (old_ids < 0), at, SIZE))
    here = tl.where(tl.sum(is_top.to(tl.int32)) > 0, is_top, at == first) & gains
    gain = tl.exp(tl.load(gamma_ptr + block) * (top - lse).to(tl.float64))
    credit = credit * decay + tl.where(here, gain, 0.0)
    ids = tl.where(here, top_id, old_ids)
    tl.store(known_ids_ptr + place, ids, mask=inside)
    tl.store(credit_ptr + place, credit, mask=inside)

    # An id that became known only now is the top id.
    is_known, infinite = ids >= 0, float("inf")
    before = tl.where(ids == old_ids, gathered, top).to(tl.float64)
    before = tl.where(is_known, before, -infinite)
    after = before + tl.load(alpha_ptr + block) * tl.log(1.0 + credit)
    wide_lse = lse.to(tl.float64)
    peak = tl.maximum(wide_lse, tl.max(after))
    more = tl.sum(tl.exp(after - peak) - tl.exp(before - peak))
    tl.store(new_lse_ptr + row, peak + tl.log(tl.exp(wide_lse - peak) + more))

    raised = after.to(best.dtype)
    is_mask = ids == mask_token_id
    mask_logit = tl.maximum(mask_logit, tl.max(tl.where(is_mask, raised, -infinite)))
    tl.store(new_mask_ptr + row, mask_logit)
    raised = tl.where(is_mask, -infinite, raised)
    new_best = tl.maximum(best, tl.max(raised))
    tl.store(new_best_ptr + row, new_best)
    none: tl.constexpr = 2**62
    winner = tl.min(tl.where(is_known & (raised >= new_best), ids, none))
    winner = tl.minimum(winner, tl.where(best >= new_best, best_id, none))
    tl.store(new_ids_ptr + row, tl.where(winner == none, best_id, winner))
