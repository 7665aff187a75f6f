"""The sum over a token's experts in Triton, alone or with the norm that follows.

Letters: T packed tokens, H hidden size, E experts here, K experts of a token, S token-expert pairs
(T * K).
"""

import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels.triton.launch import overlapped, wait_for_previous
from diffray.kernels.triton.norm import normed, rounded_sum, warps_of


def sum_pairs(
    part_SH: Tensor,
    ids_TK: Tensor,
    num_experts: int,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return each token's sum over its experts here [T, H]."""
    (num_tokens, num_chosen), hidden = ids_TK.shape, part_SH.shape[1]
    out_TH = part_SH.new_empty(num_tokens, hidden)
    block = min(triton.next_power_of_2(hidden), 1024)
    _sum_pairs[(num_tokens, triton.cdiv(hidden, block))](
        part_SH,
        ids_TK.contiguous(),
        out_TH,
        hidden,
        num_experts,
        CHOSEN=num_chosen,
        BLOCK=block,
        num_warps=4,
        **overlapped(pdl),
    )
    return out_TH


def sum_add_norm(
    part_SH: Tensor,
    ids_TK: Tensor,
    num_experts: int,
    shared_TH: Tensor | None,
    residual_TH: Tensor,
    norm_H: Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `add_norm` of each token's sum over its experts here and a shared expert."""
    (num_tokens, num_chosen), hidden = ids_TK.shape, part_SH.shape[1]
    total_TH, out_TH = part_SH.new_empty(2, num_tokens, hidden)
    block = triton.next_power_of_2(hidden)
    _sum_norm_row[(num_tokens,)](
        part_SH,
        ids_TK.contiguous(),
        None if shared_TH is None else shared_TH.contiguous(),
        residual_TH.contiguous(),
        total_TH,
        out_TH,
        norm_H,
        hidden,
        num_experts,
        eps,
        CHOSEN=num_chosen,
        SHARED=shared_TH is not None,
        BLOCK=block,
        num_warps=warps_of(block),
        **overlapped(pdl),
    )
    return total_TH, out_TH


@triton.jit
def _sum_pairs(
    part_ptr,
    ids_ptr,
    out_ptr,
    hidden,
    num_experts,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum a token's pairs in order, without those of other ranks, which were never written."""
    wait_for_previous(PDL)
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    total = _sum_of_token(part_ptr, ids_ptr, token, at, hidden, num_experts, CHOSEN)
    out = out_ptr + token.to(tl.int64) * hidden + at
    tl.store(out, total, mask=inside)


@triton.jit
def _sum_norm_row(
    part_ptr,
    ids_ptr,
    shared_ptr,
    residual_ptr,
    total_ptr,
    out_ptr,
    weight_ptr,
    hidden,
    num_experts,
    eps,
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum a token's pairs, add the shared expert's output and the residual, then norm."""
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    wait_for_previous(PDL)
    token = tl.program_id(0)
    x = _sum_of_token(part_ptr, ids_ptr, token, at, hidden, num_experts, CHOSEN)
    row = token.to(tl.int64) * hidden + at
    if SHARED:
        x = rounded_sum(x, tl.load(shared_ptr + row, mask=inside, other=0.0))
    x = rounded_sum(tl.load(residual_ptr + row, mask=inside, other=0.0), x)
    tl.store(total_ptr + row, x, mask=inside)
    tl.store(out_ptr + row, normed(x, weight, hidden, eps), mask=inside)


@triton.jit
def _sum_of_token(part_ptr, ids_ptr, token, at, hidden, num_experts, CHOSEN: tl.constexpr):
    """Return a token's sum in the parts' dtype, without pairs of other ranks."""
    total = tl.zeros(at.shape, tl.float32)
    for chosen in tl.static_range(CHOSEN):
        pair = token * CHOSEN + chosen
        expert = tl.load(ids_ptr + pair)
        here = (expert >= 0) & (expert < num_experts) & (at < hidden)
        parts = part_ptr + pair.to(tl.int64) * hidden + at
        total += tl.load(parts, mask=here, other=0.0).to(tl.float32)
    return total.to(part_ptr.dtype.element_ty)
