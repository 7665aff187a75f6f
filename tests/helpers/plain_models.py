"""The models written down plainly from a checkpoint's names: slow and clear.

An oracle for the real models: float64, one sequence, one expert of one token at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Weights = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x_NHD: Tensor, theta: float, rotated: int, stretch: float = 1.0) -> Tensor:
    out = x_NHD.clone()
    half = rotated // 2
    for position in range(x_NHD.shape[0]):
        for pair in range(half):
            turns = position / stretch / theta ** (2 * pair / rotated)
            angle = torch.tensor(turns, dtype=torch.float64)
            a, b = x_NHD[position, :, pair], x_NHD[position, :, pair + half]
            out[position, :, pair] = a * angle.cos() - b * angle.sin()
            out[position, :, pair + half] = b * angle.cos() + a * angle.sin()
    return out


def attention(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, block: int) -> Tensor:
    length, heads, size = q_NHD.shape
    shared = heads // k_NGD.shape[1]
    out = torch.zeros_like(q_NHD)
    for position in range(length):
        stop = min((position // block + 1) * block, length) if block else length
        for head in range(heads):
            k, v = k_NGD[:stop, head // shared], v_NGD[:stop, head // shared]
            out[position, head] = (k @ q_NHD[position, head] / size**0.5).softmax(0) @ v
    return out.flatten(1)


def gated(x: Tensor, w: Weights, gate: str, up: str, down: str) -> Tensor:
    return (silu(x @ w[gate].T) * (x @ w[up].T)) @ w[down].T


def stack(
    w: Weights,
    c: dict[str, Any],
    x: Tensor,
    prefix: str,
    layers: int,
    mlp: Callable[[str, int, Tensor], Tensor],
    block: int,
) -> Tensor:
    """Run the layers of the families that are named alike but for attention."""
    eps, heads, fused = c["rms_norm_eps"], c["num_attention_heads"], "n_group" in c
    kv = c.get("num_key_value_heads") or heads
    size = c.get("head_dim") or c["hidden_size"] // heads
    theta = c.get("rope_parameters", c)["rope_theta"]
    stretch = (c.get("rope_scaling") or {"factor": 1.0})["factor"]  # a linear one
    rotated = int(
        size * c.get("rope_parameters", c).get("partial_rotary_factor", 0.5 if fused else 1)
    )
    for i in range(layers):
        name = f"{prefix}.{i}"
        h = norm(x, w[f"{name}.input_layernorm.weight"], eps)
        if fused:
            rows = h @ w[f"{name}.attention.query_key_value.weight"].T
            q, k, v = rows.split([heads * size, kv * size, kv * size], -1)
            norms, out = ("attention.query_layernorm", "attention.key_layernorm"), "attention.dense"
        else:
            q, k, v = (
                h @ w[f"{name}.self_attn.{n}_proj.weight"].T
                + w.get(f"{name}.self_attn.{n}_proj.bias", 0.0)
                for n in "qkv"
            )
            norms, out = ("self_attn.q_norm", "self_attn.k_norm"), "self_attn.o_proj"
        q, k, v = (t.unflatten(-1, (-1, size)) for t in (q, k, v))
        if f"{name}.{norms[0]}.weight" in w:
            q = norm(q, w[f"{name}.{norms[0]}.weight"], eps)
            k = norm(k, w[f"{name}.{norms[1]}.weight"], eps)
        q, k = rope(q, theta, rotated, stretch), rope(k, theta, rotated, stretch)
        x = x + attention(q, k, v, block) @ w[f"{name}.{out}.weight"].T
        x = x + mlp(name, i, norm(x, w[f"{name}.post_attention_layernorm.weight"], eps))
    return norm(x, w["model.norm.weight"], eps)


def expert(w: Weights, name: str, number: int, x: Tensor) -> Tensor:
    at = f"{name}.mlp.experts.{number}"
    return gated(x, w, *(f"{at}.{p}_proj.weight" for p in ("gate", "up", "down")))


def llada(w: Weights, c: dict[str, Any], ids: Tensor) -> Tensor:
    eps, heads = c["rms_norm_eps"], c["n_heads"]
    size = c["d_model"] // heads
    x = w["model.transformer.wte.weight"][ids]
    for i in range(c["n_layers"]):
        name = f"model.transformer.blocks.{i}"
        h = norm(x, w[f"{name}.attn_norm.weight"], eps)
        q, k, v = ((h @ w[f"{name}.{n}_proj.weight"].T).unflatten(-1, (-1, size)) for n in "qkv")
        read = attention(rope(q, c["rope_theta"], size), rope(k, c["rope_theta"], size), v, 0)
        x = x + read @ w[f"{name}.attn_out.weight"].T
        h = norm(x, w[f"{name}.ff_norm.weight"], eps)
        x = x + gated(h, w, *(f"{name}.{n}.weight" for n in ("ff_proj", "up_proj", "ff_out")))
    head = "wte" if c["weight_tying"] else "ff_out"
    return (
        norm(x, w["model.transformer.ln_f.weight"], eps) @ w[f"model.transformer.{head}.weight"].T
    )


def dream(w: Weights, c: dict[str, Any], ids: Tensor, block: int = 0) -> Tensor:
    def mlp(name: str, layer: int, x: Tensor) -> Tensor:
        return gated(x, w, *(f"{name}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")))

    x = w["model.embed_tokens.weight"][ids]
    hidden = stack(w, c, x, "model.layers", c["num_hidden_layers"], mlp, block)
    head = "model.embed_tokens" if c.get("tie_word_embeddings") else "lm_head"
    return hidden @ w[f"{head}.weight"].T


def llada_moe(w: Weights, c: dict[str, Any], ids: Tensor) -> Tensor:
    def mlp(name: str, layer: int, x: Tensor) -> Tensor:
        if not c["moe_layer_freq"][layer]:
            return gated(x, w, *(f"{name}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")))
        scores = (x @ w[f"{name}.mlp.gate.weight"].T).softmax(-1)
        if c.get("moe_router_enable_expert_bias"):
            scores = scores + w[f"{name}.mlp.expert_bias"]
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for e in scores[t].argsort(descending=True)[: c["num_experts_per_tok"]].tolist():
                out[t] += scores[t, e] * expert(w, name, e, x[t])
        if c.get("shared_expert_intermediate_size"):
            at = f"{name}.shared_expert"
            out += gated(x, w, *(f"{at}.{p}_proj.weight" for p in ("gate", "up", "down")))
        return out

    x = w["model.embed_tokens.weight"][ids]
    hidden = stack(w, c, x, "model.layers", c["num_hidden_layers"], mlp, 0)
    head = "model.embed_tokens" if c.get("tie_word_embeddings") else "lm_head"
    return hidden @ w[f"{head}.weight"].T


def sdar(w: Weights, c: dict[str, Any], ids: Tensor, block: int) -> Tensor:
    def mlp(name: str, layer: int, x: Tensor) -> Tensor:
        if "num_experts" not in c:
            return gated(x, w, *(f"{name}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")))
        scores, out = (x @ w[f"{name}.mlp.gate.weight"].T).softmax(-1), torch.zeros_like(x)
        for t in range(len(x)):
            chosen = scores[t].argsort(descending=True)[: c["num_experts_per_tok"]].tolist()
            for e in chosen:
                out[t] += scores[t, e] / scores[t, chosen].sum() * expert(w, name, e, x[t])
        return out

    x = w["model.embed_tokens.weight"][ids]
    hidden = stack(w, c, x, "model.layers", c["num_hidden_layers"], mlp, block)
    head = "model.embed_tokens" if c.get("tie_word_embeddings") else "lm_head"
    return hidden @ w[f"{head}.weight"].T


def llada2_moe(w: Weights, c: dict[str, Any], ids: Tensor, block: int) -> Tensor:
    def mlp(name: str, layer: int, x: Tensor) -> Tensor:
        if layer < c["first_k_dense_replace"]:
            return gated(x, w, *(f"{name}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")))
        scores = (x @ w[f"{name}.mlp.gate.weight"].T).sigmoid()
        choice = scores + w[f"{name}.mlp.gate.expert_bias"]
        per_group = c["num_experts"] // c["n_group"]
        out = torch.zeros_like(x)
        for t in range(len(x)):
            groups = choice[t].split(per_group)
            worth = torch.stack([group.sort(descending=True).values[:2].sum() for group in groups])
            best = worth.argsort(descending=True)[: c["topk_group"]].tolist()
            allowed = [e for e in range(c["num_experts"]) if e // per_group in best]
            allowed.sort(key=lambda e: -float(choice[t, e]))
            chosen = allowed[: c["num_experts_per_tok"]]
            total = scores[t, chosen].sum() + 1e-20
            for e in chosen:
                weight = c["routed_scaling_factor"] * scores[t, e] / total
                out[t] += weight * expert(w, name, e, x[t])
        if c.get("num_shared_experts"):
            at = f"{name}.mlp.shared_experts"
            out += gated(x, w, *(f"{at}.{p}_proj.weight" for p in ("gate", "up", "down")))
        return out

    x = w["model.word_embeddings.weight"][ids]
    hidden = stack(w, c, x, "model.layers", c["num_hidden_layers"], mlp, block)
    return hidden @ w["lm_head.weight"].T
