"""Gated experts in Triton: list each expert's pairs, gate-up-SiLU, down, then sum in order.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: up
rows, then gate rows), K experts of a token, S token-expert pairs (T * K).
"""

from collections.abc import Sequence as Items
from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch.nn.functional import silu

from diffray.kernels import experts as reference
from diffray.kernels.experts import ExpertWeights
from diffray.kernels.kernel import Kernel, Tile
from diffray.kernels.numeric_errors import largest_error
from diffray.kernels.quantize import Quantized
from diffray.kernels.router import Routing
from diffray.kernels.triton.expert_products import fullest, multiply_pairs
from diffray.kernels.triton.norm import add_norm
from diffray.kernels.triton.pair_sums import sum_add_norm, sum_pairs
from diffray.kernels.triton.pairs import list_pairs

# Activations between the products are rounded to three bits; near a midpoint, the last bit of their
# own dtype decides. So a few sums have errors that are as large in float32.
_ROUNDED: Final = 4.0


def experts(x_TH: Tensor, weights: ExpertWeights, routing: Routing, *, pdl: bool = False) -> Tensor:
    """Return each token's weighted sum over its experts [T, H].

    Ids outside [0, E) name experts of other ranks and add nothing. A router may have listed the
    pairs. Scales of bytes are applied to the float32 sums; other formats run torch's.
    """
    if not _multiplies(weights):
        return reference.experts(x_TH, weights, routing)
    if routing.ids_TK.numel() == 0:
        return torch.empty_like(x_TH)
    part_SH = _outputs(x_TH, weights, routing, pdl)
    return sum_pairs(part_SH, routing.ids_TK, len(weights.w2_EHI), pdl=pdl)


def experts_add_norm(
    x_TH: Tensor,
    weights: ExpertWeights,
    routing: Routing,
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
    ids_TK, norm = routing.ids_TK, (residual_TH, norm_H, eps)
    if ids_TK.numel() == 0 or not _multiplies(weights):
        out_TH = experts(x_TH, weights, routing, pdl=pdl)
        return add_norm(out_TH if shared_TH is None else out_TH + shared_TH, *norm, pdl=pdl)
    part_SH = _outputs(x_TH, weights, routing, pdl)
    return sum_add_norm(part_SH, ids_TK, len(weights.w2_EHI), shared_TH, *norm, pdl=pdl)


def _multiplies(weights: ExpertWeights) -> bool:
    """Return whether the programs can: plain matrices or bytes, and inputs rounded for all or none.

    Rounded inputs are float8.
    """
    forms = [w.format for w in weights.quantized]
    if weights.activation is not silu or not all(form.in_bytes for form in forms):
        return False
    return not weights.rounds_inputs or [form.rounds_inputs for form in forms] == [True, True]


def _outputs(x_TH: Tensor, weights: ExpertWeights, routing: Routing, pdl: bool) -> Tensor:
    """Return each pair's weighted output [S, H]."""
    ids_TK, num_experts = routing.ids_TK, len(weights.w2_EHI)
    tile = tile_for(ids_TK.numel() / num_experts, x_TH, weights)
    pairs = routing.pairs or list_pairs(ids_TK, num_experts, pdl=pdl)
    return multiply_pairs(x_TH, weights, routing.weights_TK, pairs, tile, pdl=pdl)


def _precision(x_TH: Tensor, weights: ExpertWeights, *_: Any) -> torch.dtype:
    return torch.bfloat16 if weights.rounds_inputs else x_TH.dtype


def _error(args: Items[Any], got: Items[Tensor], expected: Items[Tensor]) -> float:
    error = largest_error(args, got, expected)
    return error / _ROUNDED if args[1].rounds_inputs else error


EXPERTS: Final = Kernel("experts", reference.experts, experts, error=_error, precision=_precision)
EXPERTS_ADD_NORM: Final = Kernel(
    "experts_add_norm",
    reference.experts_add_norm,
    experts_add_norm,
    error=_error,
    precision=_precision,
)


def tile_for(rows_per_expert: float, x_TH: Tensor, weights: ExpertWeights) -> Tile:
    """Return a tile that fits nearly every expert, the fastest on an H200 (docs/gpu.md)."""
    rows = max(triton.next_power_of_2(fullest(rows_per_expert)), 16)
    if x_TH.element_size() > 2:
        # Exact float32 uses no matrix units: large tiles spill and take minutes to compile.
        return Tile(min(rows, 32), 32, 32, 4, 2)
    in_bytes = isinstance(weights.w2_EHI, Quantized)
    if rows <= 32:
        # Bytes are widened once per tile of rows, so a tile of 16 halves the work of most experts.
        return Tile(16 if in_bytes else rows, 64, 128, 4, 3)
    if rows == 64:
        return Tile(64, 128, 64, 8, 4)
    return Tile(128, 128, 128, 8, 3) if in_bytes else Tile(128, 128, 64, 8, 4)
