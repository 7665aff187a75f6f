"""`settle` in Triton: one program for each row of blocks, compiled once for all sizes.

Letters: R rows of the head, B rows of blocks, L positions of the longest block, N positions of all
canvases.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels import acceptance
from diffray.kernels.acceptance import LONGEST, RATHER_MASKED, TIE, Progress, Rules
from diffray.kernels.confidence import Confidence
from diffray.kernels.kernel import Kernel
from diffray.kernels.rules import CONFIDENT, SHARE
from diffray.kernels.triton.launch import overlapped, wait_for_previous

_KINDS: Final = {"CONFIDENT_KIND": CONFIDENT, "SHARE_KIND": SHARE}


def settle(
    found: Confidence,
    heads_BL: Tensor,
    open_BL: Tensor,
    rules: Rules,
    progress: Progress,
    ids_N: Tensor,
    masked_N: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Make the accepted tokens final; at least one in each row that has open positions."""
    rows, length = heads_BL.shape
    gathered_RK = found.gathered_RK
    _settle_row[(rows,)](
        found.ids_R,
        found.logits_R,
        found.best_R,
        found.logsumexp_R,
        gathered_RK,
        gathered_RK.stride(0),
        heads_BL,
        open_BL,
        *rules,
        *progress,
        ids_N,
        masked_N,
        length,
        LENGTH=LONGEST,
        TIE=TIE,
        RATHER_MASKED=RATHER_MASKED,
        **_KINDS,
        num_warps=8,
        **overlapped(pdl),
    )


def _written(
    _found: Confidence,
    _heads: Tensor,
    _open: Tensor,
    _rules: Rules,
    progress: Progress,
    ids_N: Tensor,
    masked_N: Tensor,
) -> list[Tensor]:
    return [*progress[:6], ids_N, masked_N]


SETTLE: Final = Kernel(
    "settle",
    acceptance.settle,
    settle,
    written=_written,
    precision=lambda *_: torch.float32,
)


# Neither another block length nor an odd number of rows may cause another compilation.
@triton.jit(
    do_not_specialize=["gathered_stride", "size"],
    do_not_specialize_on_alignment=["kind_ptr", "steps_ptr", "taken_ptr", "before_ptr"],
)
def _settle_row(
    ids_ptr,
    logits_ptr,
    best_ptr,
    logsumexp_ptr,
    gathered_ptr,
    gathered_stride,
    heads_ptr,
    open_ptr,
    kind_ptr,
    least_ptr,
    steps_ptr,
    block_ids_ptr,
    block_masked_ptr,
    block_steps_ptr,
    block_logprobs_ptr,
    taken_ptr,
    done_ptr,
    before_ptr,
    length_ptr,
    cells_ptr,
    canvas_ids_ptr,
    canvas_masked_ptr,
    size,
    LENGTH: tl.constexpr,
    TIE: tl.constexpr,
    RATHER_MASKED: tl.constexpr,
    CONFIDENT_KIND: tl.constexpr,
    SHARE_KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, LENGTH)
    inside = at < size
    cell = row * size + at
    opened = tl.load(open_ptr + cell, mask=inside, other=0) != 0
    masked = tl.load(block_masked_ptr + cell, mask=inside, other=0) != 0
    old_ids = tl.load(block_ids_ptr + cell, mask=inside, other=0)
    head = tl.load(heads_ptr + cell, mask=inside, other=-1)
    has = head >= 0
    ids = tl.load(ids_ptr + head, mask=has, other=0)
    logprob = tl.load(logits_ptr + head, mask=has, other=0.0)
    logprob -= tl.load(logsumexp_ptr + head, mask=has, other=0.0)
    best = tl.load(best_ptr + head, mask=has, other=0.0)
    mask_logit = tl.load(gathered_ptr + head * gathered_stride, mask=has, other=0.0)
    infinite = float("inf")
    confidence = tl.exp(logprob) + tl.where(mask_logit > best, RATHER_MASKED, 0.0)
    confidence = tl.where(has, confidence, -infinite)
    scores = tl.where(opened, confidence, -infinite)

    kind = tl.load(kind_ptr + row)
    least = tl.load(least_ptr + row)
    steps = tl.load(steps_ptr + row)
    taken = tl.load(taken_ptr + row)
    length = tl.load(length_ptr + row)
    done = tl.load(done_ptr + row) != 0
    share = length // steps + tl.where(taken < length % steps, 1, 0)
    left = tl.maximum(steps - taken, 1)
    even = (tl.sum(opened.to(tl.int32)) + left - 1) // left
    count = tl.where(kind == SHARE_KIND, share, even)
    higher = scores[None, :] > scores[:, None]
    equal_before = (scores[None, :] == scores[:, None]) & (at[None, :] < at[:, None])
    rank = tl.sum((higher | equal_before).to(tl.int32), axis=1)
    wide = confidence.to(tl.float64)
    sure = tl.minimum(least, (tl.max(scores) - TIE).to(tl.float64))
    counted = (rank < count) | ((wide > least) & (kind == SHARE_KIND))
    accepted = opened & tl.where(kind == CONFIDENT_KIND, wide >= sure, counted)
    # The best open position where none was accepted.
    known = tl.where(confidence == confidence, tl.where(has, confidence, -3.0), -2.0)
    first = tl.argmax(tl.where(opened, known, -4.0), axis=0)
    none = tl.sum(accepted.to(tl.int32)) == 0
    accepted = accepted | (opened & (at == first) & none)

    new_ids = tl.where(accepted & has, ids, old_ids)
    masked = masked & (accepted == 0)
    step = tl.load(before_ptr + row) + taken
    tl.store(block_ids_ptr + cell, new_ids, mask=inside)
    tl.store(block_masked_ptr + cell, masked, mask=inside)
    tl.store(block_steps_ptr + cell, tl.zeros_like(cell) + step, mask=inside & accepted)
    tl.store(block_logprobs_ptr + cell, logprob.to(tl.float32), mask=inside & accepted)
    canvas = tl.load(cells_ptr + cell, mask=inside, other=0)
    tl.store(canvas_ids_ptr + canvas, new_ids, mask=inside)
    tl.store(canvas_masked_ptr + canvas, masked, mask=inside)
    tl.store(taken_ptr + row, taken + tl.where(done, 0, 1))
    tl.store(done_ptr + row, done | (tl.sum(masked.to(tl.int32)) == 0))
