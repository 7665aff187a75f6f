"""Gated experts in Triton: list each expert's pairs, gate-up-SiLU, down, then sum in order.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: up
rows, then gate rows), K experts of a token, S token-expert pairs (T * K).
"""

from typing import Any, Final

import torch
from torch import Tensor

from diffray.kernels import experts, flashinfer_experts, quantized
from diffray.kernels.router import Pairs
from diffray.kernels.triton.expert_products import fullest, multiply_pairs
from diffray.kernels.triton.launch import tiled_variants
from diffray.kernels.triton.norm import add_norm
from diffray.kernels.triton.pair_sums import sum_add_norm, sum_pairs
from diffray.kernels.triton.pairs import list_pairs
from diffray.kernels.variants import Kernel, Run, Shape, Tile, Variant, rounded_up


def experts_forward(
    x_TH: Tensor,
    w31_EFH: Tensor,
    w2_EHI: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs: Pairs | None = None,
    *,
    tile: Tile | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return each token's weighted sum over its experts [T, H].

    Ids outside [0, E) name experts of other ranks and add nothing. A router may have listed the
    pairs.
    """
    return quantized_experts_forward(
        x_TH, w31_EFH, None, w2_EHI, None, ids_TK, weights_TK, pairs, tile=tile, pdl=pdl
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
    tile: Tile | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return `experts_forward` for weights in int8 or float8 with a scale per row.

    The scales are applied to the float32 sums.
    """
    if ids_TK.numel() == 0:
        return torch.empty_like(x_TH)
    experts = w31_EFH, scale31_EF, w2_EHI, scale2_EH
    part_SH = _outputs(x_TH, *experts, ids_TK, weights_TK, pairs, tile, pdl)
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
    tile: Tile | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `add_norm` of the experts' output plus that of a shared expert, if there is one.

    One kernel sums over a token's experts, adds and norms.
    """
    if ids_TK.numel() == 0:
        return _add_norm(torch.empty_like(x_TH), shared_TH, residual_TH, norm_H, eps)
    experts = w31_EFH, scale31_EF, w2_EHI, scale2_EH
    part_SH = _outputs(x_TH, *experts, ids_TK, weights_TK, pairs, tile, pdl)
    norm = residual_TH, norm_H, eps
    return sum_add_norm(part_SH, ids_TK, len(w2_EHI), shared_TH, *norm, pdl=pdl)


def _flashinfer_add_norm(
    x_TH: Tensor,
    w31_EFH: Tensor,
    _scale31: None,
    w2_EHI: Tensor,
    _scale2: None,
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs: Pairs | None,
    *added: Any,
) -> tuple[Tensor, Tensor]:
    """Return the same with FlashInfer's experts; they are not quantized."""
    out_TH = flashinfer_experts.experts_forward(x_TH, w31_EFH, w2_EHI, ids_TK, weights_TK, pairs)
    return _add_norm(out_TH, *added)


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
    tile: Tile | None,
    pdl: bool,
) -> Tensor:
    """Return each pair's weighted output [S, H]."""
    num_experts = len(w2_EHI)
    tile = tile or tiles_for(ids_TK.numel() / num_experts, x_TH, w2_EHI)[0]
    pairs = pairs or list_pairs(ids_TK, num_experts, pdl=pdl)
    experts = w31_EFH, scale31_EF, w2_EHI, scale2_EH
    return multiply_pairs(x_TH, *experts, weights_TK, pairs, tile, pdl=pdl)


def tiles_of(x_TH: Tensor, w2_EHI: Tensor, ids_TK: Tensor) -> list[Tile]:
    """Return the default tile for about this many tokens, then others that may be faster."""
    return tiles_for(rounded_up(len(x_TH)) * ids_TK.shape[1] / len(w2_EHI), x_TH, w2_EHI)


def _shape(x_TH: Tensor, w31_EFH: Tensor, w2_EHI: Tensor, ids_TK: Tensor) -> Shape:
    kinds = str(x_TH.dtype), str(w31_EFH.dtype)
    return Shape((*w2_EHI.shape, ids_TK.shape[1], *kinds), (rounded_up(len(x_TH)),))


def _is_grouped_mm_a_kernel(x_TH: Tensor, w2_EHI: Tensor) -> bool:
    """Whether torch multiplies these without a loop over experts, which would sync the host."""
    if x_TH.dtype != torch.bfloat16 or any(n % 16 for n in w2_EHI.shape[1:]):
        return False
    return not x_TH.is_cuda or torch.cuda.get_device_capability(x_TH.device)[0] in (9, 10)


def _flashinfer(run: Run, x_TH: Tensor, w31_EFH: Tensor, w2_EHI: Tensor) -> list[Variant]:
    can_run = flashinfer_experts.can_run(x_TH, w31_EFH, w2_EHI)
    return [Variant("flashinfer", run)] if can_run else []


EXPERTS: Final = Kernel(
    "experts_forward",
    experts.experts_forward,
    lambda x, w31, w2, ids, *_: _shape(x, w31, w2, ids),
    lambda x, w31, w2, ids, *_: [
        *tiled_variants(tiles_of(x, w2, ids), experts_forward),
        *_flashinfer(flashinfer_experts.experts_forward, x, w31, w2),
    ],
    recordable=lambda x, _w31, w2, *_: _is_grouped_mm_a_kernel(x, w2),
)
QUANTIZED_EXPERTS: Final = Kernel(
    "quantized_experts_forward",
    quantized.quantized_experts_forward,
    lambda x, w31, _scale31, w2, _scale2, ids, *_: _shape(x, w31, w2, ids),
    lambda x, _w31, _scale31, w2, _scale2, ids, *_: tiled_variants(
        tiles_of(x, w2, ids), quantized_experts_forward
    ),
    recordable=lambda x, _w31, _scale31, w2, *_: _is_grouped_mm_a_kernel(x, w2),
)
EXPERTS_ADD_NORM: Final = Kernel(
    "experts_add_norm",
    quantized.experts_add_norm,
    lambda x, w31, _scale31, w2, _scale2, ids, *_: _shape(x, w31, w2, ids),
    lambda x, w31, _scale31, w2, _scale2, ids, *_: [
        *tiled_variants(tiles_of(x, w2, ids), experts_add_norm),
        *_flashinfer(_flashinfer_add_norm, x, w31, w2),
    ],
    recordable=lambda x, _w31, _scale31, w2, *_: _is_grouped_mm_a_kernel(x, w2),
)


def tiles_for(rows_per_expert: float, x_TH: Tensor, w2_EHI: Tensor) -> list[Tile]:
    """Return tiles that fit nearly every expert, the fastest on an H200 first (docs/gpu.md)."""
    rows = max(rounded_up(fullest(rows_per_expert)), 16)
    if x_TH.element_size() > 2:
        # Exact float32 uses no matrix units: large tiles spill and take minutes to compile.
        return [Tile(min(rows, 32), 32, 32, 4, 2)]
    in_bytes = w2_EHI.element_size() == 1
    if rows <= 32:
        # Bytes are widened once per tile of rows, so a tile of 16 halves the work of most experts.
        tile = Tile(rows, 64, 128, 4, 3)
        return list(dict.fromkeys([tile._replace(rows=16), tile])) if in_bytes else [tile]
    if rows == 64:
        return [Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 8, 4)]
    return [Tile(128, 128, 128, 8, 3) if in_bytes else Tile(128, 128, 64, 8, 4)]
