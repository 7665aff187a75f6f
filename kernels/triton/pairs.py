"""Lists each expert's token-expert pairs in Triton, one expert after the other.

Letters: T packed tokens, E experts here, K experts of a token, S token-expert pairs (T * K).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels.router import Pairs
from diffray.kernels.triton.launch import overlapped, wait_for_previous

_MOST_AT_ONCE = 4096  # pairs that a program looks at together


def list_pairs(ids_TK: Tensor, num_experts: int, *, pdl: bool = False) -> Pairs:
    """List each expert's pairs in order; ids outside [0, E) are left out."""
    num_pairs = ids_TK.numel()
    pairs = empty_pairs(num_pairs, num_experts, ids_TK.device)
    chunk = min(max(triton.next_power_of_2(num_pairs), 128), _MOST_AT_ONCE)
    _list_pairs[(num_experts + 1,)](
        ids_TK.contiguous(),
        *pairs,
        num_pairs,
        num_experts,
        CHUNK=chunk,
        ONCE=num_pairs <= chunk,
        num_warps=max(chunk // 512, 1),
        **overlapped(pdl),
    )
    return pairs


def empty_pairs(num_pairs: int, num_experts: int, device: torch.device) -> Pairs:
    return Pairs(
        torch.empty(num_experts + 1, dtype=torch.int32, device=device),
        torch.empty(num_pairs, dtype=torch.int32, device=device),
    )


@triton.jit(do_not_specialize=["num_pairs"])
def _list_pairs(
    ids_ptr,
    starts_ptr,
    order_ptr,
    num_pairs,
    num_experts,
    CHUNK: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """List one expert's pairs in order, after those of the previous experts."""
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    if ONCE:
        ids = tl.load(ids_ptr + lanes, mask=lanes < num_pairs, other=-1)
        start = tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32), axis=0)
        tl.store(starts_ptr + expert, start)
        # One extra program writes the end of the last expert; it owns no pairs.
        if expert < num_experts:
            mine = (ids == expert).to(tl.int32)
            tl.store(order_ptr + start + tl.cumsum(mine, axis=0) - 1, lanes, mask=mine == 1)
    else:
        before = tl.zeros((CHUNK,), tl.int32)
        for first in range(0, num_pairs, CHUNK):
            ids = tl.load(ids_ptr + first + lanes, mask=first + lanes < num_pairs, other=-1)
            before += ((ids >= 0) & (ids < expert)).to(tl.int32)
        start = tl.sum(before, axis=0)
        tl.store(starts_ptr + expert, start)
        if expert < num_experts:
            for first in range(0, num_pairs, CHUNK):
                ids = tl.load(ids_ptr + first + lanes, mask=first + lanes < num_pairs, other=-1)
                mine = (ids == expert).to(tl.int32)
                place = start + tl.cumsum(mine, axis=0) - 1
                tl.store(order_ptr + place, first + lanes, mask=mine == 1)
                start += tl.sum(mine, axis=0)


@triton.jit
def sort_pairs(
    ids_ptr,
    starts_ptr,
    order_ptr,
    num_pairs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List all experts' pairs in one program; every id is in [0, EXPERTS)."""
    pair = tl.arange(0, BLOCK)
    live = pair < num_pairs
    # Other programs have just written the ids, so bypass this multiprocessor's own cache.
    ids = tl.load(ids_ptr + pair, mask=live, other=EXPERTS, cache_modifier=".cg").to(tl.int32)
    tl.store(order_ptr + pair, tl.sort(ids * BLOCK + pair) % BLOCK, mask=live)
    bins = tl.arange(0, BINS)
    ends = tl.cumsum(tl.histogram(ids, BINS, mask=live), axis=0)
    tl.store(starts_ptr + bins + 1, ends, mask=bins < EXPERTS)
    tl.store(starts_ptr, 0)
