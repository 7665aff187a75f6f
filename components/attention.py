"""Self-attention of one layer: fused projections, optional norm per head, rotary, paged keys.

Letters: T packed tokens, R of them that are read, H hidden size, Q query heads, G key heads,
N heads of any kind, D head size, I the values of all heads.
"""

import torch
from torch import Tensor, nn

from diffray.components.batch import Batch
from diffray.components.dims import Dims
from diffray.components.kv_pool import KVPool
from diffray.components.layers import Angles, ColumnLinear, Cut, Part, Piece, RowLinear
from diffray.components.mesh import Mesh
from diffray.components.weight import empty
from diffray.kernels.attention import QKRotary


def key_heads(mesh: Mesh, num_kv_heads: int) -> tuple[int, int]:
    """Return this rank's half-open range of key heads; fewer heads than ranks are replicated."""
    if num_kv_heads < mesh.size and mesh.size % num_kv_heads == 0:
        head = mesh.rank * num_kv_heads // mesh.size
        return head, head + 1
    return mesh.shard(num_kv_heads, "the number of key/value heads")


class HeadNorm(nn.Module):
    """The weights of an RMSNorm per query and key head; `KVPool.attend` applies it."""

    def __init__(self, queries: int, keys: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.queries = queries
        self.weight_ND = empty(queries + keys, size, dtype=dtype)

    def parts(self) -> tuple[Part, Part]:
        """Return the queries' and the keys' part: one weight, repeated for each head."""
        shape, index = (self.weight_ND.shape[1],), (slice(None),)
        query, key = self.weight_ND[: self.queries], self.weight_ND[self.queries :]
        return Part(shape, (Piece(query, index),)), Part(shape, (Piece(key, index),))


class Attention(nn.Module):
    """Query heads are sharded over the ranks, key heads too if there are enough of them."""

    def __init__(self, layer: int, dims: Dims, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        size = dims.head_dim
        self.layer, self.head_dim, self.eps = layer, size, dims.norm_eps
        first, last = mesh.shard(dims.heads, "the number of attention heads")
        first_key, last_key = key_heads(mesh, dims.kv_heads)
        query_rows = Cut(dims.heads * size, first * size, last * size)
        key_rows = Cut(dims.kv_heads * size, first_key * size, last_key * size)
        cuts = query_rows, key_rows, key_rows
        self.queries = last - first
        self.reach: int | None = None  # how many keys back a query sees; None: all
        self.qkv = ColumnLinear("attention", dims.hidden, cuts, dtype, biased=dims.qkv_bias)
        self.norm: HeadNorm | None = None
        if dims.head_norm:
            self.norm = HeadNorm(last - first, last_key - first_key, size, dtype)
        self.out = RowLinear("attention", dims.hidden, query_rows, mesh, dtype)

    def forward(
        self,
        x_TH: Tensor,
        angles: Angles,
        batch: Batch,
        kv: KVPool,
        read_R: Tensor | None = None,
    ) -> Tensor:
        """Return the input of `out` at `read_R`, or at all tokens; store the K/V in place."""
        heads_TND = self.qkv(x_TH).unflatten(-1, (-1, self.head_dim))
        if angles.scale_T11 is not None:
            heads_TND[:, : self.queries].mul_(angles.scale_T11)
        norm_ND = None if self.norm is None else self.norm.weight_ND
        rotary = QKRotary(norm_ND, self.eps, angles.cos_T1R, angles.sin_T1R)
        seen_TI = kv.attend(self.layer, heads_TND, rotary, batch).flatten(1)
        return seen_TI if read_R is None else seen_TI.index_select(0, read_R)
