"""What families with Qwen's layers have in common: tensor names, and fields of config.json."""

import torch

from diffray.components.denoiser import Denoiser, Names
from diffray.components.dims import Dims
from diffray.components.layers import GatedMLP, GatedNames
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Fields
from diffray.kernels.choose import Kernels

QWEN2 = Names(
    embedding="model.embed_tokens.weight",
    last_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers",
    attention_norm="input_layernorm.weight",
    qkv=("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    qkv_bias=("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    attention_out="self_attn.o_proj.weight",
    mlp_norm="post_attention_layernorm.weight",
)
QWEN3 = QWEN2._replace(
    qkv_bias=(), head_norms=("self_attn.q_norm.weight", "self_attn.k_norm.weight")
)
MLP_NAMES = GatedNames("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


def read_dims(fields: Fields, names: Names) -> Dims:
    """Read config.json; refuse settings that need other arithmetic."""
    fields.only("hidden_act", "silu")
    fields.only("use_sliding_window", False)
    if {*fields.names("layer_types", [])} - {"full_attention"}:
        fields.only("layer_types")
    # Qwen2 always has the biases and reads no key.
    fields.only("attention_bias", bool(names.qkv_bias))
    heads = fields.count("num_attention_heads")
    head_dim = fields.head_dim(fields.count("hidden_size"), heads)
    return Dims(
        family=fields.family,
        layers=fields.count("num_hidden_layers"),
        hidden=fields.count("hidden_size"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=head_dim,
        head_norm=bool(names.head_norms),
        rotated=head_dim,
        rope=fields.rope(fields.count("max_position_embeddings")),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        vocab=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=bool(names.qkv_bias),
    )


def dense(
    fields: Fields,
    names: Names,
    denoising: Denoising,
    mesh: Mesh,
    dtype: torch.dtype,
    kernels: Kernels,
) -> Denoiser:
    """Return a model with a gated MLP in every layer, without storage."""
    dims, width = read_dims(fields, names), fields.count("intermediate_size")
    mlps = [GatedMLP(dims.hidden, width, MLP_NAMES, mesh, dtype) for _ in range(dims.layers)]
    return Denoiser(dims, mlps, names, mesh, dtype, denoising, kernels)
