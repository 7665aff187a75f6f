"""Write a random checkpoint in the layout of LLaDA, LLaDA-MoE or LLaDA2, to measure speed with.

    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.random_checkpoint /tmp/moe --layout llada_moe --layers 4 --dtype bfloat16

The defaults make about 100 M parameters. Weights are normal with deviation gain / sqrt(inputs). The
gains make attention choose and confidences spread between 0 and 1, so that threshold decoding
takes several steps a block, neither one nor as many as there are positions.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffray.components.mesh import Mesh
from diffray.components.models.registry import choose_build


@dataclass(frozen=True, slots=True)
class Shape:
    """What the layouts have in common; the last two ids are the mask and the end of text."""

    hidden: int = 640
    layers: int = 12
    heads: int = 10
    kv_heads: int = 10
    mlp: int = 1792
    vocab: int = 32000
    experts: int = 16
    expert_mlp: int = 224

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


QUERY_KEY_GAIN = 1.5
# Where a model normalizes queries and keys, their norms carry the gain; LLaDA's matrices do.
QUERY_KEYS = ("q_proj", "k_proj")
QUERY_KEY_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")
HEADS = ("lm_head.weight", "model.transformer.ff_out.weight")
SHARED_CONFIG = {"rope_theta": 500000.0, "rms_norm_eps": 1e-05, "use_cache": False}


def llada_config(shape: Shape) -> dict[str, Any]:
    return (
        SHARED_CONFIG
        | {
            "architectures": ["LLaDAModelLM"],
            "model_type": "llada",
            "d_model": shape.hidden,
            "n_layers": shape.layers,
            "n_heads": shape.heads,
            "n_kv_heads": shape.kv_heads,
            "mlp_hidden_size": shape.mlp,
            "mlp_ratio": 4,
            "vocab_size": shape.vocab,
            "embedding_size": shape.vocab,
            "max_sequence_length": 4096,
            "mask_token_id": shape.vocab - 2,
            "eos_token_id": shape.vocab - 1,
            "pad_token_id": shape.vocab - 1,
            "activation_type": "silu",
            "block_type": "llama",
            "block_group_size": 1,
            "layer_norm_type": "rms",
            "layer_norm_with_affine": True,
            "rope": True,
            "rope_full_precision": True,
            "init_device": "meta",
            "init_fn": "mitchell",
            "attention_dropout": 0.0,
            "embedding_dropout": 0.0,
            "residual_dropout": 0.0,
        }
        | dict.fromkeys(
            "alibi attention_layer_norm bias_for_layer_norm flash_attention include_bias"
            " include_qkv_bias scale_logits weight_tying".split(),
            False,
        )
    )


def llada_moe_config(shape: Shape) -> dict[str, Any]:
    return SHARED_CONFIG | {
        "architectures": ["LLaDAMoEModelLM"],
        "model_type": "llada",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "dense_intermediate_size": shape.mlp,
        "expert_intermediate_size": shape.expert_mlp,
        "shared_expert_intermediate_size": None,
        "num_experts": shape.experts,
        "num_experts_per_tok": min(8, shape.experts),
        "moe_layer_freq": [1] * shape.layers,
        "moe_router_score_function": "softmax",
        "qk_layernorm": True,
        "hidden_act": "silu",
        "partial_rotary_factor": 1,
        "max_position_embeddings": 8192,
        "vocab_size": shape.vocab,
        "mask_token_id": shape.vocab - 2,
        "eos_token_id": shape.vocab - 1,
        "pad_token_id": shape.vocab - 1,
        "tie_word_embeddings": False,
    }


def llada2_moe_config(shape: Shape) -> dict[str, Any]:
    groups = math.gcd(8, max(shape.experts // 2, 1))  # a group is judged by its two best
    return SHARED_CONFIG | {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "moe_intermediate_size": shape.expert_mlp,
        "first_k_dense_replace": 1,
        "num_experts": shape.experts,
        "num_experts_per_tok": min(8, shape.experts // 2),
        "num_shared_experts": 1,
        "n_group": groups,
        "topk_group": max(1, groups // 2),
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "hidden_act": "silu",
        "rotary_dim": shape.head_dim // 2,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 16384,
        "vocab_size": shape.vocab,
        "mask_token_id": shape.vocab - 2,
        "eos_token_id": shape.vocab - 1,
        "pad_token_id": shape.vocab - 1,
        "tie_word_embeddings": False,
    }


LAYOUTS = {
    "llada": llada_config,
    "llada_moe": llada_moe_config,
    "llada2_moe": llada2_moe_config,
}


def draw_weights(
    config: dict[str, Any], draw: Callable[[str, tuple[int, ...]], Tensor]
) -> dict[str, Tensor]:
    """Draw every tensor that the model of a config asks for, in the published layout."""
    parts = choose_build(config)(config, Mesh(), torch.float32).parts(set())
    return {name: draw(name, part.shape) for name, part in parts.items() if not part.optional}


def gain(name: str, config: dict[str, Any], head_gain: float) -> float:
    """Return a matrix's gain, or the value of a norm's weight or a bias."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part in ("wte", "embed_tokens", "word_embeddings"):
        return math.sqrt(config.get("d_model") or config["hidden_size"])
    if name in HEADS:
        return head_gain
    if part in QUERY_KEY_NORMS or (part in QUERY_KEYS and "d_model" in config):
        return QUERY_KEY_GAIN
    return 0.0 if part.endswith("bias") else 1.0


def write(
    folder: Path, layout: str, shape: Shape, *, seed: int, dtype: torch.dtype, head_gain: float
) -> int:
    """Write config.json and model.safetensors into `folder`; returns the number of parameters."""
    from safetensors.torch import save_file  # the configs are of use without it

    config = LAYOUTS[layout](shape)
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, size: tuple[int, ...]) -> Tensor:
        own = gain(name, config, head_gain)
        if len(size) == 1:
            return torch.full(size, own, dtype=dtype)
        deviation = own / math.sqrt(size[-1])
        weights = torch.empty(size).normal_(0, deviation, generator=generator).to(dtype)
        if name in HEADS:
            weights[shape.vocab - 2] = 0  # so that the mask token is never the best
        return weights

    tensors = draw_weights(config, draw)
    folder.mkdir(parents=True, exist_ok=True)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", choices=LAYOUTS, default="llada")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--head-gain", type=float, default=12.0, help="more: surer predictions")
    names = Shape.__dataclass_fields__
    for name, field in names.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=field.default)
    args = parser.parse_args()
    shape = Shape(**{name: getattr(args, name) for name in names})
    dtype = getattr(torch, args.dtype)
    options = {"seed": args.seed, "dtype": dtype, "head_gain": args.head_gain}
    count = write(args.folder, args.layout, shape, **options)
    print(f"{args.folder}: {args.layout}, {count / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
