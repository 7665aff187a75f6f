"""Nemotron-Labs-Diffusion: Ministral's dense stack, run causally and both ways.

Final tokens are stored by causal passes, whose rows are about the next position. A block that is
denoised sees all of itself, and its rows are about their own positions.
"""

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Config, Fields
from diffray.components.models.qwen import QWEN2, dense
from diffray.kernels.choose import TORCH, Kernels

NAMES = QWEN2._replace(
    embedding="encoder.embed_tokens.weight",
    last_norm="encoder.norm.weight",
    head="diffusion_head.weight",
    layer="encoder.layers",
    qkv_bias=(),
)


def build_nemotron(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model, without storage."""
    fields = Fields(config, "Nemotron-Labs-Diffusion")
    fields.only("mlp_bias", False)
    fields.only("sliding_window")
    # `block_diff` is how another variant was trained.
    fields.only("dlm_paradigm", "bidirectional")
    denoising = Denoising(
        block_causal=True,
        block_length=fields.count("block_size", 32),
        encodes=True,
        next_token=True,
        iterations=("block_diffusion", "first_token", "autoregressive", "self_speculation"),
        iteration={"kind": "first_token"},  # as in the authors' `generate`
    )
    return dense(fields, NAMES, denoising, mesh, dtype, kernels)
