"""Differentiable LLaDA-MoE and LLaDA2-MoE, small and plain, with the checkpoints' own names.

Parameters carry the names of the checkpoint; only the experts are stacked, and `to_checkpoint`
takes them apart. Shapes: B batch, L length, H hidden, T tokens, E experts, K chosen experts.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_demo.gradients import rms_norm, rotate
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
        """Query heads, key heads, and the size of one."""
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


class Norm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        num, num_kv, dim = shape.heads
        eps = float(shape.config["rms_norm_eps"])
        self.shape = shape

        def linear(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False)

        if shape.causal:
            self.query_key_value = linear((num + 2 * num_kv) * dim, shape.hidden)
            self.query_layernorm, self.key_layernorm = Norm(dim, eps), Norm(dim, eps)
            self.dense = linear(shape.hidden, num * dim)
        else:
            self.q_proj, self.k_proj = (
                linear(num * dim, shape.hidden),
                linear(num_kv * dim, shape.hidden),
            )
            self.v_proj, self.o_proj = (
                linear(num_kv * dim, shape.hidden),
                linear(shape.hidden, num * dim),
            )
            self.q_norm, self.k_norm = Norm(dim, eps), Norm(dim, eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        num, num_kv, dim = self.shape.heads
        if self.shape.causal:
            qkv = self.query_key_value(x)
            q, k, v = qkv.split([num * dim, num_kv * dim, num_kv * dim], dim=-1)
            q_norm, k_norm, out = self.query_layernorm, self.key_layernorm, self.dense
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            q_norm, k_norm, out = self.q_norm, self.k_norm, self.o_proj
        q = rotate(q_norm(q.unflatten(-1, (num, dim))), cos, sin).transpose(1, 2)
        k = rotate(k_norm(k.unflatten(-1, (num_kv, dim))), cos, sin).transpose(1, 2)
        v = v.unflatten(-1, (num_kv, dim)).transpose(1, 2)
        if num != num_kv:
            k, v = (t.repeat_interleave(num // num_kv, dim=1) for t in (k, v))
        if v.dtype == torch.float32:
            y = F.scaled_dot_product_attention(q, k, v, mask)
        else:  # in bf16 on a CPU the fused kernel's backward takes four times as long
            score = (q.to(v.dtype) * dim**-0.5) @ k.to(v.dtype).transpose(-1, -2)
            if mask is not None:
                score = score.masked_fill(~mask, -math.inf)
            y = score.softmax(-1).to(v.dtype) @ v
        projected: Tensor = out(y.transpose(1, 2).flatten(2))
        return projected


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Gate(nn.Module):
    """Router weights, and for LLaDA2 the bias that only enters the choice."""

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
        """Chosen experts and their weights; leaves the load and the balance loss on the side."""
        c = self.shape.config
        with torch.autocast("cpu", enabled=False):
            logits_TE = F.linear(x_TH.float(), self.gate.weight)
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
        x_TH = x.flatten(0, 1)
        chosen_TK, weight_TK = self.route(x_TH)
        order = chosen_TK.flatten().argsort(stable=True)
        rows = order // chosen_TK.shape[1]
        # The rows of an expert stand together, so that each has one product and nothing is padded.
        parts = zip(
            x_TH[rows].split(self.load_E.tolist()),
            self.w13_experts.unbind(),
            self.w2_experts.unbind(),
            strict=True,
        )
        y_SH = torch.cat([swiglu(x_EH, w13, w2) for x_EH, w13, w2 in parts])
        y_SH = y_SH.float() * weight_TK.flatten()[order, None]
        y = torch.zeros(x_TH.shape).index_add(0, rows, y_SH).view(x.shape)
        return y + self.shared_experts(x) if self.shape.causal else y


def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    gate, up = F.linear(x, w13).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w2)


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.get_submodule(self.attention_name)(self.input_layernorm(x), cos, sin, mask)
        h = self.post_attention_layernorm(x)
        y: Tensor = x + self.mlp(h)
        # LLaDA-MoE keeps its shared expert beside the mlp, LLaDA2 within it.
        return y + self.shared_expert(h) if "shared_expert" in self._modules else y


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
        self, ids_BL: Tensor, mask: Tensor | None = None, wanted: Tensor | None = None
    ) -> Tensor:
        """Return the logits, at `wanted` positions only if given.

        `mask` is True where a query may look.
        """
        table_VH = self.vocabulary.embedding()
        hidden = self.hidden(ids_BL, table_VH, mask)
        return F.linear(
            hidden if wanted is None else hidden[wanted], self.vocabulary.head(table_VH)
        )

    def hidden(self, ids_BL: Tensor, table_VH: Tensor, mask: Tensor | None) -> Tensor:
        """Everything between the embedding and the head."""
        c, length = self.shape.config, ids_BL.shape[1]
        dim = int(self.shape.heads[2] * float(c.get("partial_rotary_factor", 1)))
        inverse = float(c["rope_theta"]) ** (-torch.arange(0, dim, 2) / dim)
        angle_L1R = torch.outer(torch.arange(length), inverse)[:, None]
        cos, sin = angle_L1R.cos(), angle_L1R.sin()
        x = F.embedding(ids_BL, table_VH)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        y: Tensor = self.model.norm(x)
        return y


def block_causal(length: int, block: int) -> Tensor:
    """The mask in which a block sees itself and every block before it."""
    index = torch.arange(length) // block
    return index[:, None] >= index[None, :]


def to_checkpoint(model: DemoModel) -> dict[str, Tensor]:
    """The state under the checkpoint's names, the experts one by one."""
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
