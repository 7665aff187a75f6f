"""Autoregressive models with Llama's or Qwen's layers: blocks of one token.

A token's logits are those of the position before it, which the same forward stores. So there is
no mask token: a position is first run when its token is known. Only `introspective` needs one, for
which an adapter was trained; a checkpoint with such a drafter runs it by default.
"""

from typing import Final

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Config, Fields
from diffray.components.models.qwen import QWEN2, QWEN3, dense
from diffray.kernels.choose import TORCH, Kernels

LLAMA: Final = QWEN2._replace(qkv_bias=())
_DENOISING: Final = Denoising(
    block_causal=True,
    block_length=1,
    next_token=True,
    decoder={"kind": "sequential"},
    iterations=("autoregressive", "introspective"),
    masked=None,
)


def build_llama(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return Llama, without storage."""
    fields = _fields(config, "Llama")
    fields.only("mlp_bias", False)
    fields.only("sliding_window")
    return dense(fields, LLAMA, _denoising(fields), mesh, dtype, kernels)


def build_mistral(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return Mistral without a sliding window, which is 4096 where the config does not say."""
    return build_llama({"sliding_window": 4096, **config}, mesh, dtype, kernels)


def build_qwen2(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return Qwen2 or Qwen2.5, without storage."""
    fields = _fields(config, "Qwen2")
    return dense(fields, QWEN2, _denoising(fields), mesh, dtype, kernels)


def build_qwen3(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return Qwen3, without storage."""
    fields = _fields(config, "Qwen3")
    return dense(fields, QWEN3, _denoising(fields), mesh, dtype, kernels)


def _fields(config: Config, family: str) -> Fields:
    # transformers' default, which the configs of the first checkpoints do not say.
    fields = Fields({"rope_theta": 10000.0, **config}, family)
    fields.only("mask_token_id")  # diffusion models exist that call themselves autoregressive
    return fields


def _denoising(fields: Fields) -> Denoising:
    if fields.config.get("drafter") is None:
        return _DENOISING
    drafter = fields.inner("drafter")
    return _DENOISING._replace(
        block_length=drafter.count("block_size", 3) + 1,  # a token follows the drafts
        iterations=("introspective", "autoregressive"),
        masked=True,
    )
