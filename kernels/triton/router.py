"""Routers in Triton: from hidden states to each token's experts and the experts' pairs.

Unfused, torch multiplies, one kernel chooses and another lists the pairs. Fused, one kernel
multiplies, with the hidden size split over programs, and another sums up and chooses; its last
program lists the pairs. The few best experts are found one after the other; on ties the lowest id
wins.

Letters: T packed tokens, H hidden size, C splits of it, E experts, K experts of a token, G groups
of M experts each, J of which are chosen.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from diffray.kernels import router
from diffray.kernels.kernel import Kernel, Run
from diffray.kernels.numeric_errors import choice_error
from diffray.kernels.router import Routing
from diffray.kernels.triton.launch import overlapped, wait_for_previous
from diffray.kernels.triton.pairs import empty_pairs, list_pairs, sort_pairs
from diffray.kernels.triton.router_logits import split_logits

_TOKENS = 4  # per program
_MOST_FUSED = 256  # tokens; several programs list the pairs of more faster


def softmax_router(
    x_TH: Tensor,
    weight_EH: Tensor,
    bias_E: Tensor | None,
    num_chosen: int,
    *,
    pdl: bool = False,
) -> Routing:
    """Return the largest probabilities, not renormalised, and list the experts' pairs.

    A bias affects both the choice and the weights.
    """
    logits_CTE, done = _product(x_TH, weight_EH, pdl)
    num_splits, num_tokens, num_experts = logits_CTE.shape
    out = _outputs(logits_CTE, done, num_chosen)
    if num_tokens:
        _softmax_topk[(triton.cdiv(num_tokens, _TOKENS),)](
            logits_CTE,
            bias_E,
            done,
            *out,
            num_tokens,
            SPLITS=num_splits,
            EXPERTS=num_experts,
            CHOSEN=num_chosen,
            BIASED=bias_E is not None,
            TOKENS=_TOKENS,
            BLOCK=triton.next_power_of_2(num_experts),
            PAIRS=_pairs_block(out),
            num_warps=_TOKENS,
            **overlapped(pdl),
        )
    return _listed(out, num_experts, pdl)


def grouped_sigmoid_router(
    x_TH: Tensor,
    weight_EH: Tensor,
    bias_E: Tensor,
    num_chosen: int,
    *,
    num_groups: int,
    groups_chosen: int,
    scale: float,
    pdl: bool = False,
) -> Routing:
    """Return the best experts inside the best groups, and list the experts' pairs.

    The bias affects only the choice. A group's score is the sum of its two best experts.
    """
    logits_CTE, done = _product(x_TH, weight_EH, pdl)
    num_splits, num_tokens, num_experts = logits_CTE.shape
    group = num_experts // num_groups
    out = _outputs(logits_CTE, done, num_chosen)
    if num_tokens:
        _grouped_topk[(num_tokens,)](
            logits_CTE,
            bias_E,
            done,
            *out,
            num_tokens,
            scale,
            SPLITS=num_splits,
            GROUPS=num_groups,
            GROUP=group,
            GROUPS_CHOSEN=groups_chosen,
            CHOSEN=num_chosen,
            BLOCK_GROUPS=triton.next_power_of_2(num_groups),
            BLOCK_GROUP=triton.next_power_of_2(group),
            BLOCK_CHOSEN=triton.next_power_of_2(num_chosen),
            PAIRS=_pairs_block(out),
            num_warps=1 if done is None else 4,
            **overlapped(pdl),
        )
    return _listed(out, num_experts, pdl)


def _product(x_TH: Tensor, weight_EH: Tensor, pdl: bool) -> tuple[Tensor, Tensor | None]:
    """Return logits [C, T, E] to be summed and, if fused, a counter of finished programs."""
    if len(x_TH) <= _MOST_FUSED:
        return split_logits(x_TH, weight_EH, pdl)
    return linear(x_TH.to(weight_EH.dtype), weight_EH).unsqueeze(0), None


def _outputs(logits_CTE: Tensor, done: Tensor | None, num_chosen: int) -> Routing:
    """Return empty outputs for the choice and, if fused, for the pairs."""
    _, num_tokens, num_experts = logits_CTE.shape
    device = logits_CTE.device
    ids_TK = torch.empty(num_tokens, num_chosen, dtype=torch.long, device=device)
    weights_TK = logits_CTE.new_empty(num_tokens, num_chosen)
    if done is None or num_tokens == 0:
        return Routing(ids_TK, weights_TK)
    return Routing(ids_TK, weights_TK, *empty_pairs(ids_TK.numel(), num_experts, device))


def _listed(out: Routing, num_experts: int, pdl: bool) -> Routing:
    if out.pairs is not None:
        return out
    starts_E, order_S = list_pairs(out.ids_TK, num_experts, pdl=pdl)
    return Routing(out.ids_TK, out.weights_TK, starts_E, order_S)


def _pairs_block(out: Routing) -> int:
    """Return the size of the block that holds all pairs; 0 if they are not listed here."""
    return 0 if out.pairs is None else triton.next_power_of_2(out.ids_TK.numel())


def _kernel(name: str, reference: Run, run: Run) -> Kernel:
    def listed(x_TH: Tensor, weight_EH: Tensor, *args: Any, **options: Any) -> Routing:
        """Return the reference's choice with the pairs, as the program does."""
        found = reference(x_TH, weight_EH, *args, **options)
        starts_E, order_S = router.list_pairs(found.ids_TK, len(weight_EH))
        return Routing(found.ids_TK, found.weights_TK, starts_E, order_S)

    def precision(_x_TH: Tensor, weight_EH: Tensor, *_: Any, **__: Any) -> torch.dtype:
        return weight_EH.dtype

    return Kernel(name, listed, run, error=choice_error, precision=precision)


SOFTMAX_ROUTER: Final = _kernel("softmax_router", router.softmax_router, softmax_router)
GROUPED_SIGMOID_ROUTER: Final = _kernel(
    "grouped_sigmoid_router", router.grouped_sigmoid_router, grouped_sigmoid_router
)


@triton.jit
def _list_if_last(
    ids_ptr,
    done_ptr,
    starts_ptr,
    order_ptr,
    num_pairs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the pairs once all programs have stored their ids."""
    tl.debug_barrier()  # all threads of this program have stored theirs
    before = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        sort_pairs(ids_ptr, starts_ptr, order_ptr, num_pairs, EXPERTS, BINS, BLOCK)


@triton.jit(do_not_specialize=["num_tokens"])
def _softmax_topk(
    logits_ptr,
    bias_ptr,
    done_ptr,
    ids_ptr,
    weights_ptr,
    starts_ptr,
    order_ptr,
    num_tokens,
    SPLITS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose for some tokens."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, BLOCK)
    live = token < num_tokens
    inside = (expert < EXPERTS)[None, :]
    at = token[:, None] * EXPERTS + expert[None, :]
    # Padding is finite for tokens and -inf for experts, so no row becomes NaN.
    logits = tl.zeros((TOKENS, BLOCK), tl.float32)
    for split in tl.static_range(SPLITS):
        part = logits_ptr + split * num_tokens.to(tl.int64) * EXPERTS + at
        logits += tl.load(part, mask=live[:, None] & inside, other=0.0).to(tl.float32)
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
    if PAIRS > 0:
        num_pairs = num_tokens * CHOSEN
        _list_if_last(ids_ptr, done_ptr, starts_ptr, order_ptr, num_pairs, EXPERTS, BLOCK, PAIRS)


@triton.jit(do_not_specialize=["num_tokens"])
def _grouped_topk(
    logits_ptr,
    bias_ptr,
    done_ptr,
    ids_ptr,
    weights_ptr,
    starts_ptr,
    order_ptr,
    num_tokens,
    scale,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose for one token; its experts are arranged as [groups, experts of a group]."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_GROUP)
    expert = group[:, None] * GROUP + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < GROUP)[None, :]
    logits = tl.zeros((BLOCK_GROUPS, BLOCK_GROUP), tl.float32)
    for split in tl.static_range(SPLITS):
        row = (split * num_tokens + token) * (GROUPS * GROUP)
        logits += tl.load(logits_ptr + row + expert, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    # A padded place has the number of another group's expert, and must not count as its score.
    scores = tl.where(inside, tl.sigmoid(logits), 0.0)
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
    if PAIRS > 0:
        num_pairs = num_tokens * CHOSEN
        bins: tl.constexpr = triton.next_power_of_2(GROUPS * GROUP)
        _list_if_last(
            ids_ptr, done_ptr, starts_ptr, order_ptr, num_pairs, GROUPS * GROUP, bins, PAIRS
        )
