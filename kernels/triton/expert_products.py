"""Launches the two products of gated experts in Triton.

Tiles of the same columns run side by side, so weights are read from memory once.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: up
rows, then gate rows), K experts of a token, S token-expert pairs (T * K).
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from diffray.kernels.experts import ExpertWeights
from diffray.kernels.kernel import Tile
from diffray.kernels.quantize import Quantized
from diffray.kernels.quantized import Kept
from diffray.kernels.router import Pairs
from diffray.kernels.triton.expert_tiles import _down, _gate_up
from diffray.kernels.triton.float8_rows import round_rows
from diffray.kernels.triton.launch import overlapped, staged


def multiply_pairs(
    x_TH: Tensor,
    weights: ExpertWeights,
    weights_TK: Tensor,
    pairs: Pairs,
    tile: Tile,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return each pair's weighted output [S, H]; those of other ranks' experts are undefined."""
    w31_EFH, scale31_EF = _parts(weights.w31_EFH)
    w2_EHI, scale2_EH = _parts(weights.w2_EHI)
    num_experts, hidden, width = w2_EHI.shape
    x_TH = round_rows(x_TH, pdl=pdl) if weights.rounds_inputs else x_TH.contiguous()
    num_pairs = weights_TK.numel()
    # Row tiles of an expert run side by side; in sequence each would read its weights again.
    lanes = triton.cdiv(fullest(num_pairs / num_experts), tile.rows)
    # float8 converts to float16 in fewer instructions than to bfloat16.
    half = x_TH.dtype == torch.bfloat16 and w2_EHI.dtype == torch.float8_e4m3fn
    kind = torch.float16 if half else x_TH.dtype
    mid_SI = torch.empty(num_pairs, width, dtype=kind, device=x_TH.device)
    launch = _launch(tile, pdl)
    _gate_up[(lanes * num_experts * triton.cdiv(width, tile.columns),)](
        x_TH,
        w31_EFH,
        scale31_EF,
        mid_SI,
        *pairs,
        hidden,
        width,
        lanes,
        CHOSEN=weights_TK.shape[1],
        HALF=half,
        SCALED=scale31_EF is not None,
        **launch,
    )
    if weights.rounds_inputs:
        mid_SI = round_rows(mid_SI, pdl=pdl)
    part_SH = x_TH.new_empty(num_pairs, hidden)
    _down[(lanes * num_experts * triton.cdiv(hidden, tile.columns),)](
        mid_SI,
        w2_EHI,
        scale2_EH,
        weights_TK.contiguous(),
        part_SH,
        *pairs,
        hidden,
        width,
        lanes,
        HALF=half,
        SCALED=scale2_EH is not None,
        **launch,
    )
    return part_SH


def _parts(w: Kept) -> tuple[Tensor, Tensor | None]:
    """Return plain numbers, or bytes with a scale per row [E, O]."""
    return (w.values_EOI, w.scale_EOG.squeeze(2)) if isinstance(w, Quantized) else (w, None)


def _launch(tile: Tile, pdl: bool) -> dict[str, Any]:
    """Return the launch options of both products."""
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        **staged(tile),
        **overlapped(pdl),
    }


def fullest(rows_per_expert: float) -> int:
    """Return a number of rows that nearly no expert exceeds.

    Tokens spread over experts almost at random; the fullest is some deviations above the mean.
    """
    return max(math.ceil(rows_per_expert + 4 * math.sqrt(rows_per_expert)), 1)
