"""A layer with norms before and after each half, and a dense and a routed MLP side by side.

Letters: T packed tokens, R of them that are read, H hidden size, N heads of any kind, Q query
heads, G key heads, D head size, I the values of all heads.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from diffray.components.attention import key_heads
from diffray.components.batch import Batch
from diffray.components.denoiser import Names
from diffray.components.experts import Experts
from diffray.components.kv_pool import KVPool
from diffray.components.layers import (
    ColumnLinear,
    Cut,
    GatedMLP,
    Part,
    Parts,
    RowLinear,
    whole,
    wide,
)
from diffray.components.mesh import Mesh
from diffray.components.weight import empty
from diffray.kernels.choose import Kernels
from diffray.kernels.norm import rms_norm_wide
from diffray.kernels.rope import rope_angles, rope_frequencies, rotate
from diffray.kernels.router import Routing

Angles = tuple[Tensor, Tensor]


class Heads(NamedTuple):
    """The attention heads of a layer, on all ranks together."""

    queries: int
    keys: int
    size: int
    reach: int | None  # how many keys back a query sees; None: all
    own_values: bool  # whether values have a projection; else they are the keys
    theta: float
    share: float  # the share of a head's pairs that is rotated


class WideNorm(nn.Module):
    """RMSNorm that is scaled in float32 before the cast, optionally without a weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, *, scaled: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty(size, dtype=dtype) if scaled else None

    def forward(self, x_TH: Tensor, residual_TH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum, which is the next residual, and its norm."""
        total_TH = x_TH if residual_TH is None else residual_TH + x_TH
        return total_TH, rms_norm_wide(total_TH, self.weight, self.eps)

    def of(self, x_TH: Tensor) -> Tensor:
        return rms_norm_wide(x_TH, self.weight, self.eps)

    def part(self) -> Part:
        assert self.weight is not None
        return whole(self.weight)


class Rotations(nn.Module):
    """The angles of each kind of layer, computed for the positions of a forward."""

    def __init__(self, kinds: Collection[Heads]) -> None:
        super().__init__()
        self.kinds = tuple(kinds)
        for number, heads in enumerate(self.kinds):
            place = empty(heads.size // 2, dtype=torch.float32).data
            self.register_buffer(f"frequencies_{number}", place, persistent=False)

    def fill(self) -> None:
        """Compute the frequencies in place, after the model has been allocated."""
        for place, heads in zip(self.buffers(), self.kinds, strict=True):
            place.copy_(rope_frequencies(heads.size, heads.theta, heads.share))

    def forward(self, positions_T: Tensor) -> dict[Heads, Angles]:
        frequencies = zip(self.kinds, self.buffers(), strict=True)
        return {heads: rope_angles(positions_T, each_P) for heads, each_P in frequencies}


class NearAttention(nn.Module):
    """Attention over all keys or near ones, with norms on query, key and value heads; scale 1."""

    def __init__(
        self, layer: int, heads: Heads, hidden: int, eps: float, mesh: Mesh, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer, self.heads, self.eps = layer, heads, eps
        self.reach = heads.reach
        size = heads.size
        first, last = mesh.shard(heads.queries, "the number of attention heads")
        first_key, last_key = key_heads(mesh, heads.keys)
        self.num_queries, self.num_keys = last - first, last_key - first_key
        rows = Cut(heads.queries * size, first * size, last * size)
        key_rows = Cut(heads.keys * size, first_key * size, last_key * size)
        cuts = (rows, key_rows, key_rows) if heads.own_values else (rows, key_rows)
        self.qkv = ColumnLinear("attention", hidden, cuts, dtype)
        self.query_norm = WideNorm(size, eps, dtype)
        self.key_norm = WideNorm(size, eps, dtype)
        self.out = RowLinear("attention", hidden, rows, mesh, dtype)

    def forward(
        self, x_TH: Tensor, angles: Angles, batch: Batch, kv: KVPool, read_R: Tensor | None
    ) -> Tensor:
        """Return the output at `read_R`, or at all tokens; store the K/V in place."""
        heads_TND = self.qkv(x_TH).unflatten(-1, (-1, self.heads.size))
        q_TQD, rest_TND = heads_TND.split(
            [self.num_queries, heads_TND.shape[1] - self.num_queries], dim=1
        )
        k_TGD, v_TGD = rest_TND[:, : self.num_keys], rest_TND[:, -self.num_keys :]
        ready = (
            rotate(self.query_norm.of(q_TQD), *angles),
            rotate(self.key_norm.of(k_TGD), *angles),
            rms_norm_wide(v_TGD, None, self.eps),
        )
        where = self.layer, ready, batch
        seen_TI = kv.attend_near(*where, reach=self.reach, scale=1.0).flatten(1)
        out_TH: Tensor = self.out(seen_TI if read_R is None else seen_TI.index_select(0, read_R))
        return out_TH

    def parts(self, prefix: str) -> Parts:
        names = ("q_proj", "k_proj", "v_proj") if self.heads.own_values else ("q_proj", "k_proj")
        projections = zip(names, self.qkv.parts(), strict=True)
        return {f"{prefix}.{name}.weight": part for name, part in projections} | {
            f"{prefix}.q_norm.weight": self.query_norm.part(),
            f"{prefix}.k_norm.weight": self.key_norm.part(),
            f"{prefix}.o_proj.weight": self.out.part(),
        }


class ScaledRouter(nn.Module):
    """Chooses by softmax of the normed and scaled input; weights sum to 1 before scaling."""

    def __init__(
        self,
        experts: int,
        chosen: int,
        hidden: int,
        eps: float,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.chosen, self.eps, self.kernels = chosen, eps, kernels
        self.scale_H = empty(hidden, dtype=wide(dtype))
        self.weight_EH = empty(experts, hidden, dtype=wide(dtype))
        self.scale_E = empty(experts, dtype=wide(dtype))

    def forward(self, x_TH: Tensor) -> Routing:
        x_TH = rms_norm_wide(x_TH, None, self.eps).to(self.scale_H) * self.scale_H
        x_TH = x_TH * x_TH.shape[1] ** -0.5
        found = self.kernels.softmax_router(x_TH, self.weight_EH, None, self.chosen)
        weights_TK = found.weights_TK / found.weights_TK.sum(-1, keepdim=True)
        return found._replace(weights_TK=weights_TK * self.scale_E[found.ids_TK])

    def parts(self, prefix: str) -> Parts:
        return {
            f"{prefix}.router.scale": whole(self.scale_H),
            f"{prefix}.router.proj.weight": whole(self.weight_EH),
            f"{prefix}.router.per_expert_scale": whole(self.scale_E),
        }


class SandwichMLP(nn.Module):
    """A dense and a routed MLP on the same input, each between its own norms, then added."""

    def __init__(
        self, mlp: GatedMLP, router: ScaledRouter, experts: Experts, eps: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden = experts.hidden
        self.mlp, self.router, self.experts = mlp, router, experts
        self.mesh = mlp.down.mesh
        self.before, self.before_experts, self.after_mlp, self.after_experts, self.after = (
            WideNorm(hidden, eps, dtype) for _ in range(5)
        )

    def forward(self, x_TH: Tensor) -> Tensor:
        dense_TH = self.mlp.partial(self.before.of(x_TH))
        routed_TH = self.experts(self.before_experts.of(x_TH), self.router(x_TH))
        dense_TH, routed_TH = self.mesh.all_reduce(torch.stack([dense_TH, routed_TH])).unbind()
        return self.after.of(self.after_mlp.of(dense_TH) + self.after_experts.of(routed_TH))

    def parts(self, prefix: str, names: Collection[str]) -> Parts:
        own = {
            "pre_feedforward_layernorm": self.before,
            "pre_feedforward_layernorm_2": self.before_experts,
            "post_feedforward_layernorm_1": self.after_mlp,
            "post_feedforward_layernorm_2": self.after_experts,
            "post_feedforward_layernorm": self.after,
        }
        parts = {f"{prefix}.{name}.weight": norm.part() for name, norm in own.items()}
        experts = self.experts.fused_parts(f"{prefix}.experts", "gate_up_proj", "down_proj")
        return parts | self.mlp.parts(prefix, names) | self.router.parts(prefix) | experts


class SandwichLayer(nn.Module):
    """Attention and MLPs between norms; its output has a scale for masks and one for other tokens.

    The first denoises a canvas, the second encodes final tokens.
    """

    def __init__(self, attention: NearAttention, mlp: SandwichMLP, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = mlp.experts.hidden, attention.eps
        self.attention, self.mlp = attention, mlp
        self.attention_norm = WideNorm(hidden, eps, dtype)
        self.after_attention = WideNorm(hidden, eps, dtype)
        self.mask_scale_1 = empty(1, dtype=dtype)
        self.final_scale_1 = empty(1, dtype=dtype)

    @property
    def routed(self) -> bool:
        """Whether it has experts."""
        return True

    def forward(
        self,
        residual_TH: Tensor,
        normed_TH: Tensor,
        angles: dict[Heads, Angles],
        batch: Batch,
        kv: KVPool,
        following: WideNorm,
        read_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual of the tokens in `read_R`, or of all, and its norm.

        Stores the K/V of all tokens in place.
        """
        masked_T1 = batch.masked_T1
        assert masked_T1 is not None, "a layer of two scales needs to know which tokens are masks"
        attention = self.attention
        seen_RH = attention(normed_TH, angles[attention.heads], batch, kv, read_R)
        if read_R is not None:
            residual_TH = residual_TH.index_select(0, read_R)
            masked_T1 = masked_T1.index_select(0, read_R)
        residual_TH = residual_TH + self.after_attention.of(seen_RH)
        scale_T1 = torch.where(masked_T1, self.mask_scale_1, self.final_scale_1)
        residual_TH = (residual_TH + self.mlp(residual_TH)) * scale_T1
        return residual_TH, following.of(residual_TH)

    def pack(self) -> None:
        self.attention.qkv.pack()
        self.attention.out.pack()
        self.mlp.mlp.pack()

    def parts(self, prefix: str, _: Names, names: Collection[str]) -> Parts:
        return {
            f"{prefix}.input_layernorm.weight": self.attention_norm.part(),
            f"{prefix}.post_attention_layernorm.weight": self.after_attention.part(),
            f"{prefix}.layer_scalar": whole(self.mask_scale_1),
            **self.attention.parts(f"{prefix}.self_attn"),
            **self.mlp.parts(prefix, names),
        }
