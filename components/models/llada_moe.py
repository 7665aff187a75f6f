"""LLaDA-MoE: softmax-routed experts, a norm on each query and key head, bidirectional."""

import torch

from diffray.components.denoiser import MLP, Denoiser
from diffray.components.dims import Dims
from diffray.components.experts import Experts, SparseMLP
from diffray.components.layers import GatedMLP, GatedNames
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Config, Fields
from diffray.components.models.qwen import MLP_NAMES, QWEN3
from diffray.components.softmax_router import SoftmaxRouter
from diffray.kernels.choose import TORCH, Kernels

# Under the layer, not under its mlp, as in the checkpoints.
SHARED_NAMES = GatedNames(
    "shared_expert.gate_proj.weight",
    "shared_expert.up_proj.weight",
    "shared_expert.down_proj.weight",
)


def read_dims(fields: Fields) -> Dims:
    """Read config.json; refuse settings that need other arithmetic."""
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("use_sliding_window", False)
    fields.only("clip_qkv")
    # norm_topk_prob is not read: upstream never renormalises, whatever it says.
    fields.only("moe_router_score_function", "softmax")
    fields.only("routed_scaling_factor", 1)
    fields.only("router_num_group", -2, -1, 0, 1)
    fields.only("router_topk_group", -2, -1, 0, 1)
    heads = fields.count("num_attention_heads")
    head_dim = fields.head_dim(fields.count("hidden_size"), heads)
    return Dims(
        family=fields.family,
        layers=fields.count("num_hidden_layers"),
        hidden=fields.count("hidden_size"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=head_dim,
        head_norm=fields.flag("qk_layernorm", False),
        rotated=fields.rotated(head_dim, default=1.0),
        rope=fields.rope(fields.count("max_position_embeddings", 4096)),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        vocab=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", False),
    )


def build_llada_moe(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model, without storage."""
    fields = Fields(config, "LLaDA-MoE")
    dims = read_dims(fields)
    experts, chosen = fields.experts()
    width = fields.count("expert_intermediate_size")
    shared_width = fields.optional_count("shared_expert_intermediate_size")
    biased = fields.flag("moe_router_enable_expert_bias", False)

    def sparse() -> SparseMLP:
        shared = None
        if shared_width is not None:
            shared = GatedMLP(dims.hidden, shared_width, SHARED_NAMES, mesh, dtype)
        return SparseMLP(
            SoftmaxRouter(experts, chosen, dims.hidden, dtype, kernels, biased=biased),
            Experts(experts, dims.hidden, width, mesh, dtype, kernels),
            shared,
            mesh,
        )

    def dense() -> GatedMLP:
        dense_width = fields.count("dense_intermediate_size")
        return GatedMLP(dims.hidden, dense_width, MLP_NAMES, mesh, dtype)

    mlps: list[MLP] = [sparse() if is_sparse else dense() for is_sparse in _sparse_layers(fields)]
    return Denoiser(dims, mlps, QWEN3, mesh, dtype, Denoising(block_causal=False), kernels)


def _sparse_layers(fields: Fields) -> list[int]:
    """Return, for each layer, whether its MLP is routed."""
    layers = fields.count("num_hidden_layers")
    chosen = fields.counts("moe_layer_freq") or [1] * layers
    if len(chosen) != layers or not set(chosen) <= {0, 1}:
        raise ValueError(
            f"config.json of a LLaDA-MoE model: 'moe_layer_freq' is {chosen}; expected a 0 or 1 "
            f"for each of the {layers} layers"
        )
    return chosen
