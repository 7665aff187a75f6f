"""Fast-dLLM v2: Dream's stack and shifted logits, with block-causal attention."""

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Config, Fields
from diffray.components.models.qwen import QWEN2, dense
from diffray.kernels.choose import TORCH, Kernels


def build_fast_dllm_v2(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model, without storage."""
    fields = Fields(config, "Fast-dLLM v2")
    block = fields.count("bd_size", 32)
    denoising = Denoising(block_causal=True, block_length=block, logit_shift=1)
    return dense(fields, QWEN2, denoising, mesh, dtype, kernels)
