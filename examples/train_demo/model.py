"""Differentiable LLaDA-MoE and LLaDA2-MoE, small and plain.

Parameters have the checkpoint's names; only the experts are stacked, and `to_checkpoint` splits
them. Shapes: B batch, L length, h heads, D size of a head, R half of its rotated part, T tokens,
H hidden, E experts, K chosen experts, S = T K copies sorted by expert.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_demo.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Shape:
    """What both layouts share, read from a config.json."""

    config: dict[str, Any]

    @property
    def causal(self) -> bool:
        """Whether attention is block-causal, which only LLaDA2 is."""
        return bool(self.config["architectures"] == ["LLaDA2MoeModelLM"])

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def heads(self) -> tuple[int, int, int]:
        """The number of query heads and of key heads, and a head's size."""
        c = self.config
        num = int(c["num_attention_heads"])
        return num, int(c["num_key_value_heads"]), int(c.get("head_dim") or self.hidden // num)

    @property
    def dense_dim(self) -> int:
        return int(self.config["intermediate_size" if self.causal else "dense_intermediate_size"])

    @property
    def dense_layers(self) -> list[bool]:
        """For every layer, whether it is a plain MLP."""
        if self.causal:
            first = int(self.config["first_k_dense_replace"])
            return [i < first for i in range(int(self.config["num_hidden_layers"]))]
        return [sparse == 0 for sparse in self.config["moe_layer_freq"]]

    @property
    def expert_dim(self) -> int:
        return int(
            self.config["moe_intermediate_size" if self.causal else "expert_intermediate_size"]
        )


@functools.cache
def products_dtype() -> torch.dtype:
    """Return bfloat16 if the processor multiplies it in hardware, else float32."""
    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if able.get("amx_bf16") or able.get("avx512_bf16") else torch.float32


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T in float32, computed in the processor's fast dtype."""
    dtype = products_dtype()
    return F.linear(x.to(dtype), weight.to(dtype)).float()


def swiglu(x_T2F: Tensor) -> Tensor:
    gate, up = x_T2F.chunk(2, dim=-1)
    return F.silu(gate) * up


class Sight(NamedTuple):
    """The rotary angles of positions, and what they attend to: blocks up to their own."""

    cos_LR: Tensor
    sin_LR: Tensor
    block: int
    real_BL: Tensor | None  # None: all positions are real

    def rotate(self, x_BLhD: Tensor) -> Tensor:
        """Apply rotary embedding by halves to the first dimensions; the rest passes through."""
        cos, sin = self.cos_LR[:, None], self.sin_LR[:, None]
        half = cos.shape[-1]
        a, b, rest = x_BLhD.split([half, half, x_BLhD.shape[-1] - 2 * half], dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    @property
    def seen(self) -> Tensor:
        """Which keys each query attends to, [B or 1, 1, L, L]."""
        number_L = torch.arange(len(self.cos_LR)) // self.block
        see_1LL = (number_L[:, None] >= number_L)[None]
        if self.real_BL is not None:
            see_1LL = see_1LL & self.real_BL[:, None]
        return see_1LL[:, None]


class Norm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Matrix(nn.Module):
    """A linear layer without a bias."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        num, num_kv, dim = shape.heads
        eps = float(shape.config["rms_norm_eps"])
        self.shape = shape

        if shape.causal:
            self.query_key_value = Matrix((num + 2 * num_kv) * dim, shape.hidden)
            self.query_layernorm, self.key_layernorm = Norm(dim, eps), Norm(dim, eps)
            self.dense = Matrix(shape.hidden, num * dim)
        else:
            self.q_proj = Matrix(num * dim, shape.hidden)
            self.k_proj = Matrix(num_kv * dim, shape.hidden)
            self.v_proj = Matrix(num_kv * dim, shape.hidden)
            self.o_proj = Matrix(shape.hidden, num * dim)
            self.q_norm, self.k_norm = Norm(dim, eps), Norm(dim, eps)

    def heads(self, x_BLH: Tensor, sight: Sight) -> Tensor:
        """Return the outputs of the heads, side by side."""
        num, num_kv, dim = self.shape.heads
        if self.shape.causal:
            qkv = self.query_key_value(x_BLH)
            norms = self.query_layernorm, self.key_layernorm
        else:
            rows = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
            qkv = linear(x_BLH, torch.cat(rows))
            norms = self.q_norm, self.k_norm
        q, k, v = qkv.unflatten(-1, (-1, dim)).split([num, num_kv, num_kv], dim=2)
        q, k = (sight.rotate(norm(x)) for norm, x in zip(norms, (q, k), strict=True))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sight.seen, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    def join(self, heads: Tensor) -> Tensor:
        y: Tensor = self.dense(heads) if self.shape.causal else self.o_proj(heads)
        return y


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Matrix(inner, hidden), Matrix(inner, hidden)
        self.down_proj = Matrix(hidden, inner)

    def forward(self, x_TH: Tensor) -> Tensor:
        inner = linear(x_TH, torch.cat((self.gate_proj.weight, self.up_proj.weight)))
        y: Tensor = self.down_proj(swiglu(inner))
        return y


class Gate(nn.Module):
    """Router weights, and for LLaDA2 the bias that affects only the choice."""

    expert_bias: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        num = int(shape.config["num_experts"])
        self.weight = nn.Parameter(torch.empty(num, shape.hidden))
        if shape.causal:
            self.register_buffer("expert_bias", torch.zeros(num))


class Moe(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.num = shape, int(shape.config["num_experts"])
        self.gate = Gate(shape)
        self.w13_experts = nn.Parameter(torch.empty(self.num, 2 * shape.expert_dim, shape.hidden))
        self.w2_experts = nn.Parameter(torch.empty(self.num, shape.hidden, shape.expert_dim))
        if shape.causal:
            self.shared_experts = Mlp(shape.hidden, shape.expert_dim)
        self.load_E = torch.zeros(self.num)
        self.balance = torch.zeros(())

    def route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return chosen experts and their weights; store the load and the balance loss."""
        c = self.shape.config
        logits_TE = F.linear(x_TH, self.gate.weight)
        top = int(c["num_experts_per_tok"])
        if self.shape.causal:
            score_TE = logits_TE.sigmoid()
            choice_TE = score_TE.detach() + self.gate.expert_bias
            grouped = choice_TE.unflatten(-1, (int(c["n_group"]), -1))
            kept = grouped.topk(2, dim=-1).values.sum(-1).topk(int(c["topk_group"])).indices
            allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(1, kept, True)
            choice_TE = grouped.masked_fill(~allowed[..., None], -math.inf).flatten(1)
            chosen_TK = choice_TE.topk(top).indices
            weight_TK = score_TE.gather(1, chosen_TK)
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
            weight_TK = weight_TK * float(c["routed_scaling_factor"])
            share_E = (score_TE / score_TE.sum(-1, keepdim=True)).mean(0)
        else:
            score_TE = logits_TE.softmax(-1)
            weight_TK, chosen_TK = score_TE.topk(top)
            share_E = score_TE.mean(0)
        self.load_E = torch.bincount(chosen_TK.flatten(), minlength=self.num)
        self.balance = (share_E * self.load_E / chosen_TK.numel()).sum() * self.num
        return chosen_TK, weight_TK

    def forward(self, x_TH: Tensor) -> Tensor:
        chosen_TK, weight_TK = self.route(x_TH)
        order_S = chosen_TK.flatten().argsort(stable=True)
        rows_S = order_S // chosen_TK.shape[1]
        each = zip(
            x_TH[rows_S].split(self.load_E.tolist()), self.w13_experts, self.w2_experts, strict=True
        )
        y_SH = torch.cat([linear(swiglu(linear(x, w13)), w2) for x, w13, w2 in each])
        y_SH = y_SH * weight_TK.flatten()[order_S, None]
        y_TH = torch.zeros(x_TH.shape).index_add(0, rows_S, y_SH)
        return y_TH + self.shared_experts(x_TH) if self.shape.causal else y_TH


class Layer(nn.Module):
    def __init__(self, shape: Shape, dense: bool) -> None:
        super().__init__()
        eps = float(shape.config["rms_norm_eps"])
        self.input_layernorm = Norm(shape.hidden, eps)
        self.post_attention_layernorm = Norm(shape.hidden, eps)
        self.attention_name = "attention" if shape.causal else "self_attn"
        self.add_module(self.attention_name, Attention(shape))
        self.mlp = Mlp(shape.hidden, shape.dense_dim) if dense else Moe(shape)
        shared = shape.config.get("shared_expert_intermediate_size")
        if shared and not dense:
            self.shared_expert = Mlp(shape.hidden, int(shared))

    def forward(self, x_BLH: Tensor, sight: Sight, wanted: Tensor | None) -> Tensor:
        """Return the next hidden states; if `wanted` is given, only of its positions, as [N, H]."""
        attention = self.get_submodule(self.attention_name)
        assert isinstance(attention, Attention)
        heads = attention.heads(self.input_layernorm(x_BLH), sight)
        if wanted is None:
            x_TH, heads = x_BLH.flatten(0, 1), heads.flatten(0, 1)
        else:
            x_TH, heads = x_BLH[wanted], heads[wanted]
        x_TH = x_TH + attention.join(heads)
        h_TH = self.post_attention_layernorm(x_TH)
        y: Tensor = x_TH + self.mlp(h_TH)
        # LLaDA-MoE has its shared expert beside the MLP, LLaDA2 inside it.
        if "shared_expert" in self._modules:
            y = y + self.shared_expert(h_TH)
        return y.view(x_BLH.shape) if wanted is None else y


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape, dense) for dense in shape.dense_layers)
        self.norm = Norm(shape.hidden, float(shape.config["rms_norm_eps"]))


class DemoModel(nn.Module):
    def __init__(self, config: dict[str, Any], vocab: dict[str, int]) -> None:
        super().__init__()
        self.shape = Shape(config)
        self.vocabulary = Vocabulary(vocab, self.shape.hidden)
        self.model = Body(self.shape)

    @property
    def moes(self) -> list[Moe]:
        return [m for m in self.modules() if isinstance(m, Moe)]

    def forward(
        self, ids_BL: Tensor, real_BL: Tensor | None = None, wanted: Tensor | None = None
    ) -> Tensor:
        """Return the logits; if `wanted` is given, only at its positions.

        No position attends to those that are not `real`; by default all are.
        """
        table_VH = self.vocabulary.embedding()
        sight = self.sight(ids_BL.shape[1], real_BL)
        x = F.embedding(ids_BL, table_VH)
        *layers, last = self.model.layers
        for layer in layers:
            x = layer(x, sight, None)
        x = last(x, sight, wanted)
        return linear(self.model.norm(x), self.vocabulary.head(table_VH))

    def sight(self, length: int, real_BL: Tensor | None) -> Sight:
        c = self.shape.config
        dim = int(self.shape.heads[2] * float(c.get("partial_rotary_factor", 1)))
        inverse = float(c["rope_theta"]) ** (-torch.arange(0, dim, 2) / dim)
        angle_LR = torch.outer(torch.arange(length), inverse)
        block = int(c["block_length"]) if self.shape.causal else length
        return Sight(angle_LR.cos(), angle_LR.sin(), block, real_BL)


def to_checkpoint(model: DemoModel) -> dict[str, Tensor]:
    """Return the state under the checkpoint's names, with the experts split."""
    embedding = "word_embeddings" if model.shape.causal else "embed_tokens"
    state = {
        f"model.{embedding}.weight": model.vocabulary.embedding().detach(),
        "lm_head.weight": model.vocabulary.head(model.vocabulary.embedding()).detach(),
    }
    for name, tensor in model.state_dict().items():
        if name.startswith("vocabulary."):
            continue
        head, _, stack = name.rpartition(".")
        if stack == "w13_experts":
            for e, w13 in enumerate(tensor):
                (
                    state[f"{head}.experts.{e}.gate_proj.weight"],
                    state[f"{head}.experts.{e}.up_proj.weight"],
                ) = w13.chunk(2)
        elif stack == "w2_experts":
            state |= {f"{head}.experts.{e}.down_proj.weight": w2 for e, w2 in enumerate(tensor)}
        else:
            state[name] = tensor
    return state
