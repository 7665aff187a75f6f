"""Dream: Qwen2.5's dense stack with attention both ways; its logits are about the next position."""

import torch

from diffray.components.denoiser import Denoiser, Names
from diffray.components.dims import Dims
from diffray.components.layers import GatedMLP, GatedNames
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Config, Fields
from diffray.kernels.choose import TORCH, Kernels

NAMES = Names(
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
MLP_NAMES = GatedNames("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


def read_dims(fields: Fields) -> Dims:
    """Read config.json; refuse what would need other arithmetic."""
    fields.only("hidden_act", "silu")
    fields.only("use_sliding_window", False)
    fields.only("attention_bias", True)  # upstream has it always and reads no key
    heads = fields.count("num_attention_heads")
    head_dim = fields.head_dim(fields.count("hidden_size"), heads)
    return Dims(
        family=fields.family,
        layers=fields.count("num_hidden_layers"),
        hidden=fields.count("hidden_size"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=head_dim,
        head_norm=False,
        rotated=head_dim,
        rope_theta=fields.rope_theta(),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        vocab=fields.count("vocab_size"),
        max_positions=fields.count("max_position_embeddings"),
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=True,
    )


def build_dream(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model, without storage."""
    fields = Fields(config, "Dream")
    dims = read_dims(fields)
    width = fields.count("intermediate_size")
    mlps = [GatedMLP(dims.hidden, width, MLP_NAMES, mesh, dtype) for _ in range(dims.layers)]
    return Denoiser(
        dims, mlps, NAMES, mesh, dtype, block_causal=False, logit_shift=1, kernels=kernels
    )
