"""Dream: Qwen2.5's dense stack, bidirectional; its logits are about the next position."""

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.layers import GatedMLP
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Config, Fields
from diffray.components.models.qwen import MLP_NAMES, QWEN2, read_dims
from diffray.kernels.choose import TORCH, Kernels


def build_dream(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model, without storage."""
    fields = Fields(config, "Dream")
    dims = read_dims(fields, QWEN2)
    width = fields.count("intermediate_size")
    mlps = [GatedMLP(dims.hidden, width, MLP_NAMES, mesh, dtype) for _ in range(dims.layers)]
    return Denoiser(
        dims,
        mlps,
        QWEN2,
        mesh,
        dtype,
        Denoising(block_causal=False, logit_shift=1, canvas_length=256),
        kernels,
    )
