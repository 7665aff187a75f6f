"""The sum over a token's experts in Triton.

Letters: T packed tokens, H hidden size, E experts here, K experts of a token, S token-expert pairs
(T * K).
"""

import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels.triton.launch import overlapped, wait_for_previous


def sum_pairs(part_SH: Tensor, ids_TK: Tensor, num_experts: int, *, pdl: bool = False) -> Tensor:
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
    """Sum a token's pairs in order; pairs of other ranks were never written."""
    wait_for_previous(PDL)
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    total = _sum_of_token(part_ptr, ids_ptr, token, at, hidden, num_experts, CHOSEN)
    out = out_ptr + token.to(tl.int64) * hidden + at
    tl.store(out, total, mask=inside)


@triton.jit
def _sum_of_token(part_ptr, ids_ptr, token, at, hidden, num_experts, CHOSEN: tl.constexpr):
    """Return a token's sum in the parts' dtype; pairs of other ranks were never written."""
    total = tl.zeros(at.shape, tl.float32)
    for chosen in tl.static_range(CHOSEN):
        pair = token * CHOSEN + chosen
        expert = tl.load(ids_ptr + pair)
        here = (expert >= 0) & (expert < num_experts) & (at < hidden)
        parts = part_ptr + pair.to(tl.int64) * hidden + at
        total += tl.load(parts, mask=here, other=0.0).to(tl.float32)
    return total.to(part_ptr.dtype.element_ty)
