"""Gated experts in Triton: list each expert's pairs, gate-up-SiLU, down, then sum in order.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: up
rows, then gate rows), K experts of a token, S token-expert pairs (T * K).
"""

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from diffray.kernels import experts, flashinfer_experts, quantized
from diffray.kernels.router import Pairs
from diffray.kernels.triton.expert_products import AHEAD_S, fullest, multiply_pairs
from diffray.kernels.triton.launch import EARLY_S, tiled_variants
from diffray.kernels.triton.norm import add_norm
from diffray.kernels.triton.pair_sums import sum_add_norm, sum_pairs
from diffray.kernels.triton.pairs import list_pairs
from diffray.kernels.variants import Kernel, Run, Shape, Tile, Variant, rounded_up

# Tiles of persistent programs: two fit a multiprocessor, with any number of rows up to 64.
_STAYING: Final = ((64, 64, 4, 4), (32, 128, 4, 3))
_MOST_STAYING: Final = 512  # tokens; with more, arithmetic takes longer than reading weights
# Columns, depth, warps and stages that may suit a tile's rows: none of them spills on Hopper.
_FEW_ROWS: Final = (
    (32, 128, 4, 3),
    (32, 128, 4, 4),
    (64, 64, 4, 4),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 128, 8, 3),
    (128, 64, 8, 3),
    (128, 128, 8, 3),
)
_OTHERS: Final = {
    16: _FEW_ROWS,
    32: tuple(each for each in _FEW_ROWS if each != (128, 64, 8, 3)),  # it spills in float16
    64: (
        (32, 128, 4, 3),
        (64, 64, 4, 4),
        (64, 64, 4, 5),
        (64, 128, 8, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
    ),
    128: ((64, 64, 8, 4), (64, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4)),
}


def experts_forward(
    x_TH: Tensor,
    w31_EFH: Tensor,
    w2_EHI: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs: Pairs | None = None,
    *,
    tile: Tile | None = None,
    stay: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Return each token's weighted sum over its experts [T, H].

    Ids outside [0, E) name experts of other ranks and add nothing. A router may have listed the
    pairs.
    """
    return quantized_experts_forward(
        x_TH, w31_EFH, None, w2_EHI, None, ids_TK, weights_TK, pairs, tile=tile, stay=stay, pdl=pdl
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
    half: bool = False,
    stay: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Return `experts_forward` for weights in int8 or float8 with a scale per row.

    Products are in `x_TH`'s dtype or, with `half`, float16; scales are applied to the float32 sums.
    """
    if ids_TK.numel() == 0:
        return torch.empty_like(x_TH)
    experts = w31_EFH, scale31_EF, w2_EHI, scale2_EH
    part_SH = _outputs(x_TH, *experts, ids_TK, weights_TK, pairs, tile, half, stay, pdl)
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
    fused: bool = False,
    half: bool = False,
    stay: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `add_norm` of the experts' output plus that of a shared expert, if there is one.

    If `fused`, one kernel sums over a token's experts, adds and norms.
    """
    experts = w31_EFH, scale31_EF, w2_EHI, scale2_EH
    if fused and ids_TK.numel() > 0:
        part_SH = _outputs(x_TH, *experts, ids_TK, weights_TK, pairs, tile, half, stay, pdl)
        norm = residual_TH, norm_H, eps
        return sum_add_norm(part_SH, ids_TK, len(w2_EHI), shared_TH, *norm, pdl=pdl)
    out_TH = quantized_experts_forward(
        x_TH, *experts, ids_TK, weights_TK, pairs, tile=tile, half=half, stay=stay, pdl=pdl
    )
    return _add_norm(out_TH, shared_TH, residual_TH, norm_H, eps, pdl=pdl)


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
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    if shared_TH is not None:
        out_TH = out_TH + shared_TH
    return add_norm(out_TH, residual_TH, norm_H, eps, pdl=pdl)


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
    half: bool,
    stay: bool,
    pdl: bool,
) -> Tensor:
    """Return each pair's weighted output [S, H]."""
    num_experts = len(w2_EHI)
    tile = tile or tile_for(ids_TK.numel() / num_experts, x_TH.element_size())
    pairs = pairs or list_pairs(ids_TK, num_experts, pdl=pdl)
    experts = w31_EFH, scale31_EF, w2_EHI, scale2_EH
    return multiply_pairs(x_TH, *experts, weights_TK, pairs, tile, half=half, stay=stay, pdl=pdl)


def tiles_of(x_TH: Tensor, num_experts: int, num_chosen: int) -> list[Tile]:
    """Return the default tile for about this many tokens, then others that may be faster.

    No expert has more rows than there are tokens. With that many rows in a tile, or 64, even an
    expert that many tokens choose is read once.
    """
    tokens = rounded_up(len(x_TH))
    default = tile_for(tokens * num_chosen / num_experts, x_TH.element_size())
    if x_TH.element_size() > 2:  # others take minutes to compile
        return [default]
    rows = dict.fromkeys([default.rows, min(max(tokens, 16), 64)])
    return list(dict.fromkeys([default, *(Tile(n, *rest) for n in rows for rest in _OTHERS[n])]))


def _shape(x_TH: Tensor, w31_EFH: Tensor, w2_EHI: Tensor, ids_TK: Tensor) -> Shape:
    kinds = str(x_TH.dtype), str(w31_EFH.dtype)
    return Shape((*w2_EHI.shape, ids_TK.shape[1], *kinds), (rounded_up(len(x_TH)),))


def _is_grouped_mm_a_kernel(x_TH: Tensor, w2_EHI: Tensor) -> bool:
    """Whether torch multiplies these without a loop over experts, which would sync the host."""
    if x_TH.dtype != torch.bfloat16 or any(n % 16 for n in w2_EHI.shape[1:]):
        return False
    return not x_TH.is_cuda or torch.cuda.get_device_capability(x_TH.device)[0] in (9, 10)


def _variants(
    run: Run, faster: tuple[str, Run], x_TH: Tensor, w31_EFH: Tensor, w2_EHI: Tensor, ids_TK: Tensor
) -> list[Variant]:
    """Return `run` with the default tile, then the likely faster program with all tiles."""
    tiles = tiles_of(x_TH, len(w2_EHI), ids_TK.shape[1])
    name, program = faster
    if x_TH.dtype == torch.bfloat16 and w31_EFH.dtype == torch.float8_e4m3fn:
        name, program = f"{name} half", partial(program, half=True)
    found = tiled_variants(tiles, program, name)
    if program is not run:
        found = tiled_variants(tiles[:1], run) + found
    if x_TH.element_size() > 2 or rounded_up(len(x_TH)) > _MOST_STAYING:
        return found
    rows = max(tile.rows for tile in tiles)
    staying = [Tile(min(rows, 64), *rest) for rest in _STAYING]
    return found + tiled_variants(
        staying, partial(program, stay=True), f"{name} stay", EARLY_S + AHEAD_S
    )


def _flashinfer(run: Run, x_TH: Tensor, w31_EFH: Tensor, w2_EHI: Tensor) -> list[Variant]:
    can_run = flashinfer_experts.can_run(x_TH, w31_EFH, w2_EHI)
    return [Variant("flashinfer", run)] if can_run else []


EXPERTS: Final = Kernel(
    "experts_forward",
    experts.experts_forward,
    lambda x, w31, w2, ids, *_: _shape(x, w31, w2, ids),
    lambda x, w31, w2, ids, *_: [
        *_variants(experts_forward, ("triton", experts_forward), x, w31, w2, ids),
        *_flashinfer(flashinfer_experts.experts_forward, x, w31, w2),
    ],
    recordable=lambda x, _w31, w2, *_: _is_grouped_mm_a_kernel(x, w2),
)
QUANTIZED_EXPERTS: Final = Kernel(
    "quantized_experts_forward",
    quantized.quantized_experts_forward,
    lambda x, w31, _scale31, w2, _scale2, ids, *_: _shape(x, w31, w2, ids),
    lambda x, w31, _scale31, w2, _scale2, ids, *_: _variants(
        quantized_experts_forward, ("triton", quantized_experts_forward), x, w31, w2, ids
    ),
    recordable=lambda x, _w31, _scale31, w2, *_: _is_grouped_mm_a_kernel(x, w2),
)
EXPERTS_ADD_NORM: Final = Kernel(
    "experts_add_norm",
    quantized.experts_add_norm,
    lambda x, w31, _scale31, w2, _scale2, ids, *_: _shape(x, w31, w2, ids),
    lambda x, w31, _scale31, w2, _scale2, ids, *_: [
        *_variants(
            experts_add_norm,
            ("triton fused", partial(experts_add_norm, fused=True)),
            x,
            w31,
            w2,
            ids,
        ),
        *_flashinfer(_flashinfer_add_norm, x, w31, w2),
    ],
    recordable=lambda x, _w31, _scale31, w2, *_: _is_grouped_mm_a_kernel(x, w2),
)


def tile_for(rows_per_expert: float, itemsize: int) -> Tile:
    """Return a tile that fits nearly every expert, within reasonable sizes."""
    rows = max(rounded_up(fullest(rows_per_expert)), 16)
    if itemsize > 2:
        # Exact float32 uses no matrix units: large tiles spill and take minutes to compile.
        return Tile(min(rows, 32), 32, 32, 4, 2)
    if rows == 64:  # with depth 128 one program would fill a multiprocessor
        return Tile(rows, 64, 64, 4, 4)
    rows = min(rows, 128)
    return Tile(rows, 64, 128, 8 if rows == 128 else 4, 3)
