"""Dream: Qwen2.5's dense stack, bidirectional; its logits are about the next position."""

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Config, Fields
from diffray.components.models.qwen import QWEN2, dense
from diffray.kernels.choose import TORCH, Kernels


def build_dream(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model, without storage."""
    denoising = Denoising(block_causal=False, logit_shift=1, canvas_length=256)
    return dense(Fields(config, "Dream"), QWEN2, denoising, mesh, dtype, kernels)
