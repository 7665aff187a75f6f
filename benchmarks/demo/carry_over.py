"""Start a LLaDA-MoE from a trained LLaDA2-MoE of the same sizes.

Attention, norms, embeddings and experts carry over exactly: key heads are repeated, fused rows are
cut apart. Only the routers differ (sigmoid with normalised weights there, plain softmax here), so
the experts' outputs are rescaled once and the rest is left to training.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.demo.model import DemoModel, from_checkpoint

RENAMED = (
    ("word_embeddings", "embed_tokens"), ("attention.query_layernorm", "self_attn.q_norm"),
    ("attention.key_layernorm", "self_attn.k_norm"), ("attention.dense", "self_attn.o_proj"),
    ("mlp.shared_experts", "shared_expert"),
)  # fmt: skip


def start_from(model: DemoModel, folder: Path) -> None:
    """Fill `model` with an exported checkpoint's weights, of its own layout or carried over."""
    own = json.loads((folder / "config.json").read_text())["model_type"]
    if own != model.shape.config["model_type"]:
        carry_over(model, folder)
        return
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        from_checkpoint(model, {name: tensor.float() for name, tensor in stored.items()})


def carry_over(model: DemoModel, folder: Path) -> None:
    """Fill `model`, a LLaDA-MoE, with the weights of a LLaDA2-MoE checkpoint."""
    num, num_kv, dim = model.shape.heads
    tensors: dict[str, Tensor] = {}
    for name, stored in load_file(folder / "model.safetensors").items():
        tensor = stored.float()
        for old, new in RENAMED:
            name = name.replace(old, new)
        if name.endswith("expert_bias"):
            continue
        if "query_key_value" not in name:
            # A chosen pair of experts weighs 2 there and about 0.6 of a softmax here.
            tensors[name] = tensor * 3 if ".experts." in name and "down" in name else tensor
            continue
        rest = (len(tensor) - num * dim) // 2
        q, k, v = tensor.split([num * dim, rest, rest])
        base = name.replace("attention.query_key_value", "self_attn.{}_proj")
        tensors[base.format("q")] = q
        for letter, rows in (("k", k), ("v", v)):
            heads = rows.unflatten(0, (-1, dim))
            repeated = heads.repeat_interleave(num_kv // len(heads), dim=0)
            tensors[base.format(letter)] = repeated.flatten(0, 1)
    with torch.no_grad():
        from_checkpoint(model, tensors)
