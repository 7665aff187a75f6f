"""Attention of packed windows over paged keys: the plain torch form, one SDPA per window shape.

Letters: T packed queries of all windows, S slots of the K/V pool, H query heads, G key heads,
D head size, B windows of one group, Q queries of a window, K keys of a sequence.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Group(NamedTuple):
    """Neighbouring windows of equal shape, from packed query `start` on."""

    start: int
    windows: int
    queries: int
    keys_BK: Tensor | None  # pool slots of the keys; None where the window itself holds every key
    mask_BQK: Tensor | None  # True where a query may look; None where it sees all keys


def window_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    groups: tuple[Group, ...],
) -> Tensor:
    """Return what each query reads from the keys of its own sequence; the pool is only read."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_shared = num_heads // k_TGD.shape[1]
    out_THD = q_THD.new_empty(num_tokens, num_heads, head_dim)
    for group in groups:
        stop = group.start + group.windows * group.queries
        shape = (group.windows, group.queries)
        q = q_THD[group.start : stop].unflatten(0, shape).transpose(1, 2)
        if group.keys_BK is None:
            k = k_TGD[group.start : stop].unflatten(0, shape).transpose(1, 2)
            v = v_TGD[group.start : stop].unflatten(0, shape).transpose(1, 2)
        else:
            # Not by an index in brackets: on a CPU index_select is several times as fast.
            slots, windows = group.keys_BK.flatten(), (group.windows, -1)
            k = k_SGD.index_select(0, slots).unflatten(0, windows).transpose(1, 2)
            v = v_SGD.index_select(0, slots).unflatten(0, windows).transpose(1, 2)
        if num_shared > 1:
            k = k.repeat_interleave(num_shared, dim=1)
            v = v.repeat_interleave(num_shared, dim=1)
        mask = None if group.mask_BQK is None else group.mask_BQK.unsqueeze(1)
        read = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out_THD[group.start : stop] = read.transpose(1, 2).flatten(0, 1)
    return out_THD
