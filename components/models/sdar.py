"""SDAR and TraDo: Qwen3's stack, dense or with routed experts; block-causal attention.

I-DLM too has SDAR's names, but causal attention, and rows about the next position.
"""

from typing import Final

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.experts import Experts, SparseMLP
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Config, Fields
from diffray.components.models.qwen import QWEN3, dense, read_dims
from diffray.components.softmax_router import SoftmaxRouter
from diffray.kernels.choose import TORCH, Kernels

# The "dynamic" rule of the paper and the model cards.
DECODER: Final = {"kind": "threshold", "threshold": 0.95}


def build_sdar(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the dense model, without storage."""
    introspective = config.get("use_regular_causal") is True
    fields = Fields(config, "I-DLM" if introspective else "SDAR")
    made = _introspective(fields) if introspective else _denoising(fields)
    return dense(fields, QWEN3, made, mesh, dtype, kernels)


def build_sdar_moe(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model with routed experts in every layer, without storage."""
    fields = Fields(config, "SDAR-MoE")
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [])
    # Without the key, Qwen3's sparse models do not renormalise weights.
    fields.must_be("norm_topk_prob", True)
    hidden, layers = fields.count("hidden_size"), fields.count("num_hidden_layers")
    experts, chosen = fields.experts()
    width = fields.count("moe_intermediate_size")

    def sparse() -> SparseMLP:
        router = SoftmaxRouter(experts, chosen, hidden, dtype, kernels, renormalised=True)
        return SparseMLP(router, Experts(experts, hidden, width, mesh, dtype, kernels), None, mesh)

    mlps = [sparse() for _ in range(layers)]
    dims = read_dims(fields, QWEN3)
    return Denoiser(dims, mlps, QWEN3, mesh, dtype, _denoising(fields), kernels)


def _denoising(fields: Fields) -> Denoising:
    # Checkpoints were trained with 4 to 64. The configs of the first, with 4, do not say so.
    block = fields.count("block_size", 4)
    fields.only("use_regular_causal", False)
    return Denoising(block_causal=True, block_length=block, decoder=DECODER)


def _introspective(fields: Fields) -> Denoising:
    return Denoising(
        block_causal=True,
        block_length=fields.count("block_size", 3) + 1,  # a token follows the drafts
        next_token=True,
        decoder={"kind": "sequential"},
        iterations=("introspective", "autoregressive"),
    )
