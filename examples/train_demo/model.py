"""Differentiable LLaDA-MoE and LLaDA2-MoE, small and plain.

Parameters have LLaDA-MoE's names; `to_checkpoint` renames them for LLaDA2, and splits the experts,
which are stacked. Shapes: B batch, L length, h heads, D size of a head, R half of its rotated part,
T tokens, H hidden, E experts, K chosen experts, S = T K copies sorted by expert.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_demo.vocabulary import Vocabulary

LLADA2_NAMES = {
    "self_attn.": "attention.", "o_proj.": "dense.", "q_norm.": "query_layernorm.",
    "k_norm.": "key_layernorm.",
}  # fmt: skip


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
        return int(c["num_attention_heads"]), int(c["num_key_value_heads"]), int(c["head_dim"])

    @property
    def eps(self) -> float:
        return float(self.config["rms_norm_eps"])

    @property
    def dense_dim(self) -> int:
        return int(self.config["intermediate_size" if self.causal else "dense_intermediate_size"])

    @property
    def expert_dim(self) -> int:
        prefix = "moe" if self.causal else "expert"
        return int(self.config[f"{prefix}_intermediate_size"])

    @property
    def dense_layers(self) -> list[bool]:
        """For every layer, whether it is a plain MLP."""
        if self.causal:
            first = int(self.config["first_k_dense_replace"])
            return [i < first for i in range(int(self.config["num_hidden_layers"]))]
        return [sparse == 0 for sparse in self.config["moe_layer_freq"]]


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
    """The rotary angles of positions, and which keys each query attends to."""

    cos_LR: Tensor
    sin_LR: Tensor
    seen_LL: Tensor

    def rotate(self, x_BLhD: Tensor) -> Tensor:
        """Apply rotary embedding by halves to the first dimensions; the rest passes through."""
        cos, sin = self.cos_LR[:, None], self.sin_LR[:, None]
        half = cos.shape[-1]
        a, b, rest = x_BLhD.split([half, half, x_BLhD.shape[-1] - 2 * half], dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def sight(shape: Shape, length: int) -> Sight:
    """Return what positions see: all others, or with LLaDA2 blocks up to their own."""
    c = shape.config
    dim = int(shape.heads[2] * float(c.get("partial_rotary_factor", 1)))
    inverse = float(c["rope_theta"]) ** (-torch.arange(0, dim, 2) / dim)
    angle_LR = torch.outer(torch.arange(length), inverse)
    block_L = torch.arange(length) // (int(c["block_length"]) if shape.causal else length)
    return Sight(angle_LR.cos(), angle_LR.sin(), block_L[:, None] >= block_L)


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
        num, num_kv, dim = self.heads = shape.heads
        rows = {"q_proj": num * dim, "k_proj": num_kv * dim, "v_proj": num_kv * dim}
        if shape.causal:
            rows = {"query_key_value": sum(rows.values())}
        self.projections = [f"{name}.weight" for name in rows]
        for name, count in rows.items():
            self.add_module(name, Matrix(count, shape.hidden))
        self.q_norm, self.k_norm = nn.RMSNorm(dim, shape.eps), nn.RMSNorm(dim, shape.eps)
        self.o_proj = Matrix(shape.hidden, num * dim)

    def forward(self, x_BLH: Tensor, sight: Sight) -> Tensor:
        """Return the outputs of the heads, side by side; `o_proj` comes after them."""
        num, num_kv, dim = self.heads
        qkv = linear(x_BLH, torch.cat([self.get_parameter(name) for name in self.projections]))
        q, k, v = qkv.unflatten(-1, (-1, dim)).split([num, num_kv, num_kv], dim=2)
        q, k = sight.rotate(self.q_norm(q)), sight.rotate(self.k_norm(k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sight.seen_LL, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Matrix(inner, hidden), Matrix(inner, hidden)
        self.down_proj = Matrix(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        inner = linear(x, torch.cat((self.gate_proj.weight, self.up_proj.weight)))
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

    def forward(self, x: Tensor) -> Tensor:
        x_TH = x.flatten(0, -2)
        chosen_TK, weight_TK = self.route(x_TH)
        order_S = chosen_TK.flatten().argsort(stable=True)
        rows_S = order_S // chosen_TK.shape[1]
        each = zip(
            x_TH[rows_S].split(self.load_E.tolist()), self.w13_experts, self.w2_experts, strict=True
        )
        y_SH = torch.cat([linear(swiglu(linear(x, w13)), w2) for x, w13, w2 in each])
        y_SH = y_SH * weight_TK.flatten()[order_S, None]
        y_TH = torch.zeros(x_TH.shape).index_add(0, rows_S, y_SH)
        y_TH = y_TH + self.shared_experts(x_TH) if self.shape.causal else y_TH
        return y_TH.view_as(x)


class Layer(nn.Module):
    def __init__(self, shape: Shape, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape.hidden, shape.dense_dim) if dense else Moe(shape)

    def forward(self, x_BLH: Tensor, sight: Sight, wanted_BL: Tensor | None = None) -> Tensor:
        """Return the next hidden states; if `wanted` is given, only of its positions, as [N, H]."""
        heads = self.self_attn(self.input_layernorm(x_BLH), sight)
        x = x_BLH
        if wanted_BL is not None:
            x, heads = x[wanted_BL], heads[wanted_BL]
        x = x + self.self_attn.o_proj(heads)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape, dense) for dense in shape.dense_layers)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)


class DemoModel(nn.Module):
    def __init__(self, config: dict[str, Any], vocab: dict[str, int]) -> None:
        super().__init__()
        self.shape = Shape(config)
        self.vocabulary = Vocabulary(vocab, self.shape.hidden)
        self.model = Body(self.shape)

    @property
    def moes(self) -> list[Moe]:
        return [m for m in self.modules() if isinstance(m, Moe)]

    def forward(self, ids_BL: Tensor, wanted_BL: Tensor) -> Tensor:
        """Return the logits at the wanted positions."""
        table_VH = self.vocabulary.embedding()
        seen = sight(self.shape, ids_BL.shape[1])
        x = F.embedding(ids_BL, table_VH)
        *layers, last = self.model.layers
        for layer in layers:
            x = layer(x, seen)
        x = last(x, seen, wanted_BL)
        return linear(self.model.norm(x), self.vocabulary.head(table_VH))


def initialise(model: DemoModel) -> None:
    """Draw the weights of all matrices of the layers."""
    c, causal = model.shape.config, model.shape.causal
    for name, parameter in model.model.named_parameters():
        if parameter.dim() < 2:
            continue
        std = parameter.shape[-1] ** -0.5
        if any(part in name for part in ("o_proj", "w2", "down_proj")):
            std /= math.sqrt(2 * int(c["num_hidden_layers"]))
        if "w2" in name and not causal:
            std *= int(c["num_experts"]) / 2  # a softmax gives each of two experts about 1/16
        if "mlp.gate.weight" in name:
            std = 0.02
        nn.init.normal_(parameter, std=std)


def to_checkpoint(model: DemoModel) -> dict[str, Tensor]:
    """Return the state under the checkpoint's names, with the experts split."""
    causal, table_VH = model.shape.causal, model.vocabulary.embedding()
    state = {
        f"model.{'word_embeddings' if causal else 'embed_tokens'}.weight": table_VH.detach(),
        "lm_head.weight": model.vocabulary.head(table_VH).detach(),
    }
    for name, tensor in model.model.state_dict(prefix="model.").items():
        place, _, stack = name.rpartition(".")
        if causal:
            for ours, theirs in LLADA2_NAMES.items():
                name = name.replace(ours, theirs)
        if not stack.endswith("_experts"):
            state[name] = tensor
            continue
        parts = ("gate", "up") if stack == "w13_experts" else ("down",)
        for number, expert in enumerate(tensor):
            names = [f"{place}.experts.{number}.{part}_proj.weight" for part in parts]
            state |= zip(names, expert.chunk(len(parts)), strict=True)
    return state
