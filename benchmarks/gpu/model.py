"""The model that serves, of random weights made on the device, in the sizes of a shape."""

from typing import Any

import torch

from benchmarks.gpu.shapes import Shape
from diffray.components.backend import choose_dtype
from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model
from diffray.kernels.choose import Kernels


def random_model(
    shape: Shape, length: int, dtype: str, device: torch.device, kernels: Kernels
) -> Denoiser:
    """Make a model of a shape's layout; its products keep the size of what they multiply."""
    model = build_model(config_of(shape, length), Mesh(), choose_dtype(dtype, device), kernels)
    model.allocate(device)
    for name, weights in model.named_parameters():
        if weights.dim() == 1 or name.endswith("norm.weight_ND"):
            weights.fill_(0.0 if name.endswith("bias_E") else 1.0)
        else:
            weights.normal_(0.0, weights.shape[-1] ** -0.5)
    model.embedding.weight_VH.normal_()
    return model


def config_of(shape: Shape, length: int) -> dict[str, Any]:
    """Return the config.json of a published layout in these sizes."""
    if shape.sparse is None:
        return _dense_config(shape, length)
    both = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "partial_rotary_factor": shape.rotated / shape.head_dim,
        "rope_theta": 5e5,
        "max_position_embeddings": length,
        "num_experts": shape.sparse.experts,
        "num_experts_per_tok": shape.sparse.chosen,
    }
    if shape.sparse.groups == 0:
        return both | {
            "architectures": ["LLaDAMoEModelLM"],
            "qk_layernorm": shape.head_norm,
            "expert_intermediate_size": shape.sparse.width,
            "shared_expert_intermediate_size": shape.sparse.shared_width or None,
        }
    return both | {
        "architectures": ["LLaDA2MoeModelLM"],
        "use_bias": False,
        "n_group": shape.sparse.groups,
        "topk_group": shape.sparse.groups_chosen,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": shape.sparse.width,
        "num_shared_experts": shape.sparse.shared_width // shape.sparse.width or None,
        "intermediate_size": shape.width,
        "first_k_dense_replace": shape.sparse.dense_layers,
        "moe_router_enable_expert_bias": True,
    }


def _dense_config(shape: Shape, length: int) -> dict[str, Any]:
    return {
        "architectures": ["LLaDAModelLM"],
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "rope": True,
        "include_bias": False,
        "weight_tying": False,
        "vocab_size": shape.vocab,
        "d_model": shape.hidden,
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "mlp_hidden_size": shape.width,
        "rope_theta": 5e5,
        "max_sequence_length": length,
    }
