"""Chooses each token's experts in Triton, in one pass over the router's logits.

The few best experts are found one after the other; on ties the lowest id wins.

Letters: T packed tokens, E experts, K experts of a token, G groups of M experts each, J of which
are chosen.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels import router
from diffray.kernels.errors import choice_error
from diffray.kernels.variants import Kernel, Shape, Variant, rounded_up

_TOKENS = 4  # per program


def softmax_topk(
    logits_TE: Tensor, bias_E: Tensor | None, num_chosen: int
) -> tuple[Tensor, Tensor]:
    """Return ids and weights [T, K]: the largest probabilities, not renormalised.

    A bias affects both the choice and the weights.
    """
    num_tokens, num_experts = logits_TE.shape
    ids_TK = torch.empty(num_tokens, num_chosen, dtype=torch.long, device=logits_TE.device)
    weights_TK = logits_TE.new_empty(num_tokens, num_chosen)
    if num_tokens:
        _softmax_topk[(triton.cdiv(num_tokens, _TOKENS),)](
            logits_TE.contiguous(),
            bias_E,
            ids_TK,
            weights_TK,
            num_tokens,
            EXPERTS=num_experts,
            CHOSEN=num_chosen,
            BIASED=bias_E is not None,
            TOKENS=_TOKENS,
            BLOCK=triton.next_power_of_2(num_experts),
            num_warps=_TOKENS,
        )
    return ids_TK, weights_TK


def grouped_sigmoid_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    num_chosen: int,
    *,
    num_groups: int,
    groups_chosen: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return ids and weights [T, K], chosen inside the best groups of consecutive experts.

    The bias affects only the choice. A group's score is the sum of its two best experts.
    """
    num_tokens, num_experts = logits_TE.shape
    group = num_experts // num_groups
    ids_TK = torch.empty(num_tokens, num_chosen, dtype=torch.long, device=logits_TE.device)
    weights_TK = logits_TE.new_empty(num_tokens, num_chosen)
    if num_tokens:
        _grouped_topk[(num_tokens,)](
            logits_TE.contiguous(),
            bias_E,
            ids_TK,
            weights_TK,
            scale,
            GROUPS=num_groups,
            GROUP=group,
            GROUPS_CHOSEN=groups_chosen,
            CHOSEN=num_chosen,
            BLOCK_GROUPS=triton.next_power_of_2(num_groups),
            BLOCK_GROUP=triton.next_power_of_2(group),
            BLOCK_CHOSEN=triton.next_power_of_2(num_chosen),
            num_warps=1,
        )
    return ids_TK, weights_TK


def _shape(logits_TE: Tensor, bias_E: Tensor | None, num_chosen: int, **options: Any) -> Shape:
    num_tokens, num_experts = logits_TE.shape
    biased = "plain" if bias_E is None else "biased"
    facts = num_experts, num_chosen, biased, str(logits_TE.dtype), *map(str, options.values())
    return Shape(facts, (rounded_up(num_tokens),))


SOFTMAX_TOPK: Final = Kernel(
    "softmax_topk",
    router.softmax_topk,
    _shape,
    lambda *_: [Variant("triton", softmax_topk)],
    error=choice_error,
)
GROUPED_SIGMOID_TOPK: Final = Kernel(
    "grouped_sigmoid_topk",
    router.grouped_sigmoid_topk,
    _shape,
    lambda *_args, **_options: [Variant("triton", grouped_sigmoid_topk)],
    error=choice_error,
)


@triton.jit(do_not_specialize=["num_tokens"])
def _softmax_topk(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose for some tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, BLOCK)
    live = token < num_tokens
    inside = (expert < EXPERTS)[None, :]
    at = token[:, None] * EXPERTS + expert[None, :]
    # Padding is finite for tokens and -inf for experts, so no row becomes NaN.
    logits = tl.load(logits_ptr + at, mask=live[:, None] & inside, other=0.0).to(tl.float32)
    logits = tl.where(inside, logits, float("-inf"))
    mass = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    scores = mass / tl.sum(mass, axis=1)[:, None]
    if BIASED:
        bias = tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
        scores += bias[None, :]
    scores = tl.where(inside, scores, float("-inf"))
    for k in tl.static_range(CHOSEN):
        best, index = tl.max(scores, axis=1, return_indices=True)
        tl.store(ids_ptr + token * CHOSEN + k, index.to(tl.int64), mask=live)
        tl.store(weights_ptr + token * CHOSEN + k, best, mask=live)
        scores = tl.where(expert[None, :] == index[:, None], float("-inf"), scores)


@triton.jit
def _grouped_topk(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    scale,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
):
    """Choose for one token; its experts are arranged as [groups, experts of a group]."""
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_GROUP)
    expert = group[:, None] * GROUP + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < GROUP)[None, :]
    logits = tl.load(logits_ptr + token * (GROUPS * GROUP) + expert, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    scores = tl.sigmoid(logits.to(tl.float32))
    choice = tl.where(inside, scores + bias, float("-inf"))
    if GROUPS_CHOSEN < GROUPS:
        first, index = tl.max(choice, axis=1, return_indices=True)
        rest = tl.where(member[None, :] == index[:, None], float("-inf"), choice)
        worth = tl.where(group < GROUPS, first + tl.max(rest, axis=1), float("-inf"))
        kept = tl.zeros((BLOCK_GROUPS,), tl.int32)
        for _j in tl.static_range(GROUPS_CHOSEN):
            best_worth, best_group = tl.max(worth, axis=0, return_indices=True)
            kept = tl.where((group == best_group) & (worth == best_worth), 1, kept)
            worth = tl.where(group == best_group, float("-inf"), worth)
        choice = tl.where(kept[:, None] == 1, choice, float("-inf"))

    lane = tl.arange(0, BLOCK_CHOSEN)
    ids = tl.zeros((BLOCK_CHOSEN,), tl.int32)
    weights = tl.zeros((BLOCK_CHOSEN,), tl.float32)
    for k in tl.static_range(CHOSEN):
        best = tl.max(tl.max(choice, axis=1), axis=0)
        # On ties the lowest id wins, as everywhere.
        tied = tl.where(choice == best, expert, GROUPS * GROUP)
        best_id = tl.min(tl.min(tied, axis=1), axis=0)
        score = tl.sum(tl.sum(tl.where(expert == best_id, scores, 0.0), axis=1), axis=0)
        ids = tl.where(lane == k, best_id, ids)
        weights = tl.where(lane == k, score, weights)
        choice = tl.where(expert == best_id, float("-inf"), choice)
    if CHOSEN > 1:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    tl.store(ids_ptr + token * CHOSEN + lane, ids.to(tl.int64), mask=lane < CHOSEN)
    tl.store(weights_ptr + token * CHOSEN + lane, weights * scale, mask=lane < CHOSEN)
