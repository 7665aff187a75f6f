"""Gated experts in Triton: list each expert's pairs, gate-up-SiLU, down, then sum in order.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: up
rows, then gate rows), K experts of a token, S token-expert pairs (T * K).
"""

from typing import Final

import torch
import triton
from torch import Tensor

from diffray.kernels import experts, quantized
from diffray.kernels.kernel import Kernel, Tile
from diffray.kernels.router import Pairs
from diffray.kernels.triton.expert_products import fullest, multiply_pairs
from diffray.kernels.triton.norm import add_norm
from diffray.kernels.triton.pair_sums import sum_add_norm, sum_pairs
from diffray.kernels.triton.pairs import list_pairs


def experts_forward(
    x_TH: Tensor,
    w31_EFH: Tensor,
    w2_EHI: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs: Pairs | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return each token's weighted sum over its experts [T, H].

    Ids outside [0, E) name experts of other ranks and add nothing. A router may have listed the
    pairs.
    """
    return quantized_experts_forward(
        x_TH, w31_EFH, None, w2_EHI, None, ids_TK, weights_TK, pairs, pdl=pdl
    )


def quantized_experts_forward(
    x_TH: Tensor,
    w31_EFH: Tensor,
    scale31_EF: Tensor | None,
    w2_EHI: Tensor,
    scale2_EH: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs: Pairs | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return `experts_forward` for weights in int8 or float8 with a scale per row.

    The scales are applied to the float32 sums.
    """
    if ids_TK.numel() == 0:
        return torch.empty_like(x_TH)
    experts = w31_EFH, scale31_EF, w2_EHI, scale2_EH
    part_SH = _outputs(x_TH, *experts, ids_TK, weights_TK, pairs, pdl)
    return sum_pairs(part_SH, ids_TK, len(w2_EHI), pdl=pdl)


def experts_add_norm(
    x_TH: Tensor,
    w31_EFH: Tensor,
    scale31_EF: Tensor | None,
    w2_EHI: Tensor,
    scale2_EH: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs: Pairs | None,
    shared_TH: Tensor | None,
    residual_TH: Tensor,
    norm_H: Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `add_norm` of the experts' output plus that of a shared expert, if there is one.

    One kernel sums over a token's experts, adds and norms.
    """
    if ids_TK.numel() == 0:
        return _add_norm(torch.empty_like(x_TH), shared_TH, residual_TH, norm_H, eps)
    experts = w31_EFH, scale31_EF, w2_EHI, scale2_EH
    part_SH = _outputs(x_TH, *experts, ids_TK, weights_TK, pairs, pdl)
    norm = residual_TH, norm_H, eps
    return sum_add_norm(part_SH, ids_TK, len(w2_EHI), shared_TH, *norm, pdl=pdl)


def _add_norm(
    out_TH: Tensor,
    shared_TH: Tensor | None,
    residual_TH: Tensor,
    norm_H: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    if shared_TH is not None:
        out_TH = out_TH + shared_TH
    return add_norm(out_TH, residual_TH, norm_H, eps)


def _outputs(
    x_TH: Tensor,
    w31_EFH: Tensor,
    scale31_EF: Tensor | None,
    w2_EHI: Tensor,
    scale2_EH: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs: Pairs | None,
    pdl: bool,
) -> Tensor:
    """Return each pair's weighted output [S, H]."""
    num_experts = len(w2_EHI)
    tile = tile_for(ids_TK.numel() / num_experts, x_TH, w2_EHI)
    pairs = pairs or list_pairs(ids_TK, num_experts, pdl=pdl)
    experts = w31_EFH, scale31_EF, w2_EHI, scale2_EH
    return multiply_pairs(x_TH, *experts, weights_TK, pairs, tile, pdl=pdl)


EXPERTS: Final = Kernel("experts_forward", experts.experts_forward, experts_forward)
QUANTIZED_EXPERTS: Final = Kernel(
    "quantized_experts_forward",
    quantized.quantized_experts_forward,
    quantized_experts_forward,
)
EXPERTS_ADD_NORM: Final = Kernel("experts_add_norm", quantized.experts_add_norm, experts_add_norm)


def tile_for(rows_per_expert: float, x_TH: Tensor, w2_EHI: Tensor) -> Tile:
    """Return a tile that fits nearly every expert, the fastest on an H200 (docs/gpu.md)."""
    rows = max(triton.next_power_of_2(fullest(rows_per_expert)), 16)
    if x_TH.element_size() > 2:
        # Exact float32 uses no matrix units: large tiles spill and take minutes to compile.
        return Tile(min(rows, 32), 32, 32, 4, 2)
    in_bytes = w2_EHI.element_size() == 1
    if rows <= 32:
        # Bytes are widened once per tile of rows, so a tile of 16 halves the work of most experts.
        return Tile(16 if in_bytes else rows, 64, 128, 4, 3)
    if rows == 64:
        return Tile(64, 128, 64, 8, 4)
    return Tile(128, 128, 128, 8, 3) if in_bytes else Tile(128, 128, 64, 8, 4)
