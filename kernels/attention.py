"""Attention of packed windows over paged keys: the plain torch form, one SDPA per window shape.

Letters: T packed tokens, S slots of the K/V pool, N heads of any kind, H query heads, G key heads,
D head size, R rotated size, B windows of one group, Q queries of a window, K keys of a sequence.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from diffray.kernels.norm import rms_norm
from diffray.kernels.rope import rotate
from diffray.kernels.windows import Group, PagedWindows, Windows


class QKRotary(NamedTuple):
    """How query and key heads are normed and rotated before attention."""

    norm_ND: Tensor | None  # a row for each query and key head; None skips the norm
    eps: float
    cos_T1R: Tensor
    sin_T1R: Tensor


class KVLayer(NamedTuple):
    """The K/V pool of one layer: a row for each slot."""

    keys_SGD: Tensor
    values_SGD: Tensor


def attend(
    heads_THD: Tensor, rotary: QKRotary, kv: KVLayer, slots_T: Tensor, windows: Windows
) -> Tensor:
    """Norm and rotate heads, store keys and values in place, return the attention output.

    Each token has its query heads first, then its key heads, then as many value heads.
    """
    q_THD, k_TGD, v_TGD = rotate_heads(heads_THD, rotary, kv.keys_SGD.shape[1])
    return attend_ready(q_THD, k_TGD, v_TGD, kv, slots_T, windows.groups)


def rotate_heads(
    heads_THD: Tensor, rotary: QKRotary, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values; queries and keys are normed and rotated."""
    num_turned = heads_THD.shape[1] - num_keys
    qk_THD, v_TGD = heads_THD[:, :num_turned], heads_THD[:, num_turned:]
    if rotary.norm_ND is not None:
        qk_THD = rms_norm(qk_THD, rotary.norm_ND, rotary.eps)
    qk_THD = rotate(qk_THD, rotary.cos_T1R, rotary.sin_T1R)
    return qk_THD[:, :-num_keys], qk_THD[:, -num_keys:], v_TGD


def attend_ready(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    kv: KVLayer,
    slots_T: Tensor,
    groups: tuple[Group, ...],
    scale: float | None = None,
) -> Tensor:
    """Do the same with heads that are already normed and rotated, optionally with another scale."""
    kv.keys_SGD.index_copy_(0, slots_T, k_TGD)
    kv.values_SGD.index_copy_(0, slots_T, v_TGD)
    return window_attention(q_THD, k_TGD, v_TGD, *kv, groups, scale)


def window_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    groups: tuple[Group, ...],
    scale: float | None = None,
    out_THD: Tensor | None = None,
) -> Tensor:
    """Return each query's attention over the keys of its sequence; the pool is not modified.

    The default scale is that of the head size. `out_THD` is where to store it.
    """

    def gather(group: Group) -> tuple[Tensor, Tensor]:
        assert group.keys_BK is not None
        # On a CPU index_select is several times as fast as an index in brackets.
        slots, windows = group.keys_BK.flatten(), (group.windows, -1)
        k_BKGD = k_SGD.index_select(0, slots).unflatten(0, windows)
        return k_BKGD, v_SGD.index_select(0, slots).unflatten(0, windows)

    return attend_groups(q_THD, k_TGD, v_TGD, gather, groups, scale, out_THD)


def attend_groups(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    gather: Callable[[Group], tuple[Tensor, Tensor]],
    groups: tuple[Group, ...],
    scale: float | None,
    out_THD: Tensor | None = None,
) -> Tensor:
    """Do the same with K/V from `gather` for groups whose windows do not hold all their keys."""
    shared = q_THD.shape[1] > k_TGD.shape[1]
    out_THD = q_THD.new_empty(q_THD.shape) if out_THD is None else out_THD
    for group in groups:
        stop = group.start + group.windows * group.queries
        shape = (group.windows, group.queries)
        q = q_THD[group.start : stop].unflatten(0, shape).transpose(1, 2)
        if group.keys_BK is None:
            k = k_TGD[group.start : stop].unflatten(0, shape)
            v = v_TGD[group.start : stop].unflatten(0, shape)
        else:
            k, v = gather(group)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        mask = None if group.mask_BQK is None else group.mask_BQK.unsqueeze(1)
        read = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)
        out_THD[group.start : stop] = read.transpose(1, 2).flatten(0, 1)
    return out_THD


def rotate_and_store(
    heads_TND: Tensor,
    rotary: QKRotary,
    keys_SGD: Tensor,
    values_SGD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Return the queries, normed and rotated; store the keys, likewise, and the values in place.

    N = H + 2G: query heads, key heads, value heads. No slot may occur twice, except one that is
    never read.
    """
    q_THD, k_TGD, v_TGD = rotate_heads(heads_TND, rotary, keys_SGD.shape[1])
    keys_SGD.index_copy_(0, slots_T, k_TGD)
    values_SGD.index_copy_(0, slots_T, v_TGD)
    return q_THD


def paged_attention(
    q_THD: Tensor, keys_SGD: Tensor, values_SGD: Tensor, windows: PagedWindows
) -> Tensor:
    """Return each query's attention over the keys of its sequence; the pool is not modified.

    Tokens outside all windows are undefined. This is the reference that kernels are compared with;
    no engine runs it, because it reads the windows on the host, one by one.
    """
    out_THD = torch.zeros_like(q_THD)
    num_shared = q_THD.shape[1] // keys_SGD.shape[1]
    first, starts, stops, blocks = (part.tolist() for part in windows[:4])
    size = windows.page_size
    for w, (start, stop, block) in enumerate(zip(starts, stops, blocks, strict=True)):
        queries = slice(first[w], first[w + 1])
        if queries.start == queries.stop:
            continue
        keys_K = torch.arange(stop, device=q_THD.device)
        slots_K = windows.pages_WP[w, keys_K // size].long() * size + keys_K % size
        at = torch.arange(start, start + queries.stop - queries.start, device=q_THD.device)
        ends = (at // block + 1) * block if block else torch.full_like(at, stop)
        k, v = (
            pool[slots_K].transpose(0, 1).repeat_interleave(num_shared, dim=0)
            for pool in (keys_SGD, values_SGD)
        )
        mask = keys_K < ends.unsqueeze(1)
        read = scaled_dot_product_attention(q_THD[queries].transpose(0, 1), k, v, attn_mask=mask)
        out_THD[queries] = read.transpose(0, 1)
    return out_THD
