"""A2D: autoregressive models with Llama's or Qwen's layers, which dllm trained to denoise.

The configs of MDLM and BD3LM checkpoints are equal, so a policy chooses the attention: `blockwise`
shows a block the whole canvas, as MDLM needs it; `block_diffusion` itself and all before it, in
blocks that are counted from the end of the prompt both ways.
"""

from typing import Final

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.autoregressive import LLAMA
from diffray.components.models.fields import Config, Fields
from diffray.components.models.qwen import QWEN2, QWEN3, dense
from diffray.kernels.choose import TORCH, Kernels

FAMILY: Final = "A2D"
_DENOISING: Final = Denoising(
    block_causal=False, iterations=("blockwise", "block_diffusion", "first_token", "soft")
)


def build_a2d_llama(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model with Llama's layers, without storage."""
    fields = Fields(config, FAMILY)
    fields.only("mlp_bias", False)
    return dense(fields, LLAMA, _DENOISING, mesh, dtype, kernels)


def build_a2d_qwen2(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model with Qwen2's layers, without storage."""
    return dense(Fields(config, FAMILY), QWEN2, _DENOISING, mesh, dtype, kernels)


def build_a2d_qwen3(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model with Qwen3's layers, without storage."""
    return dense(Fields(config, FAMILY), QWEN3, _DENOISING, mesh, dtype, kernels)
