"""Norm and rotate query and key heads and store keys and values in their pages, in one pass.

Letters: T packed tokens, N heads (Q queries, then G keys, then G values), D head size, R rotated
size, S slots of the K/V pool.
"""

import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels.attention import QKRotary
from diffray.kernels.triton.launch import overlapped, wait_for_previous

_HEADS_AT_ONCE = 16


def rotate_and_store(
    heads_TND: Tensor,
    rotary: QKRotary,
    keys_SGD: Tensor,
    values_SGD: Tensor,
    slots_T: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return the queries, normed and rotated; store the keys, likewise, and the values.

    N = Q + 2G: query heads, key heads, value heads. No slot may occur twice, except for
    padding.
    """
    norm_ND, eps, cos_T1R, sin_T1R = rotary
    num_tokens, num_heads, head_dim = heads_TND.shape
    num_keys = keys_SGD.shape[1]
    num_queries = num_heads - 2 * num_keys
    q_TQD = heads_TND.new_empty(num_tokens, num_queries, head_dim)
    if num_tokens:
        tile = min(triton.next_power_of_2(num_heads), _HEADS_AT_ONCE)
        _rotate_heads[(num_tokens, triton.cdiv(num_heads, tile))](
            heads_TND.contiguous(),
            norm_ND,
            cos_T1R.contiguous(),
            sin_T1R.contiguous(),
            q_TQD,
            keys_SGD,
            values_SGD,
            slots_T.contiguous(),
            eps,
            QUERIES=num_queries,
            KEYS=num_keys,
            SIZE=head_dim,
            ROTATED=cos_T1R.shape[-1],
            NORM=norm_ND is not None,
            HEADS=tile,
            BLOCK=triton.next_power_of_2(head_dim),
            num_warps=4,
            **overlapped(pdl),
        )
    return q_TQD


@triton.jit
def _rotate_heads(
    heads_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process some heads of one token.

    Each dimension reloads its rotation partner, from the cache, instead of exchanging it between
    threads.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    partner = tl.where(dim < ROTATED, (dim + ROTATED // 2) % ROTATED, dim)
    inside = (head < QUERIES + 2 * KEYS) & (dim < SIZE)
    turning = inside & (head < QUERIES + KEYS)
    if NORM:
        weight = tl.load(norm_ptr + head * SIZE + dim, mask=turning, other=0.0).to(tl.float32)
        weight_other = tl.load(norm_ptr + head * SIZE + partner, mask=turning, other=0.0)
    wait_for_previous(PDL)
    row = heads_ptr + (token * (QUERIES + 2 * KEYS) + head) * SIZE
    x = tl.load(row + dim, mask=inside, other=0.0)
    other = tl.load(row + partner, mask=turning, other=0.0)
    narrow = x.dtype
    normed, partnered = x.to(tl.float32), other.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(normed * normed, axis=1) / SIZE + eps)[:, None]
        normed = (normed * scale).to(narrow).to(tl.float32) * weight
        partnered = (partnered * scale).to(narrow).to(tl.float32) * weight_other.to(tl.float32)
        normed = normed.to(narrow).to(tl.float32)
        partnered = partnered.to(narrow).to(tl.float32)
    cos = tl.load(cos_ptr + token * ROTATED + dim, mask=dim < ROTATED, other=1.0)
    sin = tl.load(sin_ptr + token * ROTATED + dim, mask=dim < ROTATED, other=0.0)
    turned = (normed * cos + partnered * sin).to(narrow)

    slot = tl.load(slots_ptr + token).to(tl.int64)
    q_at = q_ptr + (token * QUERIES + head) * SIZE + dim
    tl.store(q_at, turned, mask=inside & (head < QUERIES))
    key = head - QUERIES
    k_at = keys_ptr + (slot * KEYS + key) * SIZE + dim
    tl.store(k_at, turned, mask=turning & (key >= 0))
    value = key - KEYS
    v_at = values_ptr + (slot * KEYS + value) * SIZE + dim
    tl.store(v_at, x, mask=inside & (value >= 0))
