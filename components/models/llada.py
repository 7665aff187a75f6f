"""Dense LLaDA: a Llama-like stack with bidirectional attention."""

import torch

from diffray.components.denoiser import Denoiser, Names
from diffray.components.dims import Dims
from diffray.components.layers import GatedMLP, GatedNames
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Config, Fields
from diffray.kernels.choose import TORCH, Kernels

NAMES = Names(
    embedding="model.transformer.wte.weight",
    last_norm="model.transformer.ln_f.weight",
    head="model.transformer.ff_out.weight",
    layer="model.transformer.blocks",
    attention_norm="attn_norm.weight",
    qkv=("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    attention_out="attn_out.weight",
    mlp_norm="ff_norm.weight",
)
MLP_NAMES = GatedNames("ff_proj.weight", "up_proj.weight", "ff_out.weight")


def read_dims(fields: Fields) -> Dims:
    """Read config.json; refuse settings that need other arithmetic."""
    # Upstream's defaults for these are GPT-2's, so an absent key does not mean ours.
    fields.must_be("block_type", "llama")
    fields.must_be("activation_type", "silu")
    fields.must_be("layer_norm_type", "rms")
    fields.must_be("rope", True)
    fields.must_be("include_bias", False)
    for key in (
        "alibi",
        "attention_layer_norm",
        "bias_for_layer_norm",
        "include_qkv_bias",
        "input_emb_norm",
        "scale_logits",
    ):
        fields.only(key, False)
    fields.only("layer_norm_with_affine", True)
    fields.only("rope_full_precision", True)
    fields.only("block_group_size", 1)
    fields.only("clip_qkv")
    fields.only("rope_scaling")
    heads = fields.count("n_heads")
    head_dim = fields.head_dim(fields.count("d_model"), heads)
    shared_keys = fields.flag("multi_query_attention", False)
    return Dims(
        family=fields.family,
        layers=fields.count("n_layers"),
        hidden=fields.count("d_model"),
        heads=heads,
        kv_heads=fields.count("n_kv_heads", 1 if shared_keys else heads),
        head_dim=head_dim,
        head_norm=False,
        rotated=head_dim,
        rope=fields.rope(fields.count("max_sequence_length")),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        vocab=fields.optional_count("embedding_size") or fields.count("vocab_size"),
        tied=fields.flag("weight_tying"),
    )


def build_llada(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model, without storage."""
    fields = Fields(config, "LLaDA")
    dims = read_dims(fields)
    width = fields.optional_count("mlp_hidden_size") or fields.count("mlp_ratio") * dims.hidden
    mlps = [GatedMLP(dims.hidden, width, MLP_NAMES, mesh, dtype) for _ in range(dims.layers)]
    return Denoiser(dims, mlps, NAMES, mesh, dtype, Denoising(block_causal=False), kernels)
