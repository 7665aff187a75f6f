"""Fast-dLLM v2: Dream's stack and shifted logits, with block-causal attention."""

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.layers import GatedMLP
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Config, Fields
from diffray.components.models.qwen import MLP_NAMES, QWEN2, read_dims
from diffray.kernels.choose import TORCH, Kernels


def build_fast_dllm_v2(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model, without storage."""
    fields = Fields(config, "Fast-dLLM v2")
    dims = read_dims(fields, QWEN2)
    width = fields.count("intermediate_size")
    mlps = [GatedMLP(dims.hidden, width, MLP_NAMES, mesh, dtype) for _ in range(dims.layers)]
    return Denoiser(
        dims,
        mlps,
        QWEN2,
        mesh,
        dtype,
        Denoising(block_causal=True, block_length=fields.count("bd_size", 32), logit_shift=1),
        kernels,
    )
