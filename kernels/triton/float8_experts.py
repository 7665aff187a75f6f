"""Gated experts whose inputs are float8 rows too.

Few rows are multiplied in Triton, many by torch's grouped product of float8 matrices.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: up
rows, then gate rows), K experts of a token, S token-expert pairs (T * K).
"""

from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels import quantized
from diffray.kernels.router import Pairs
from diffray.kernels.triton.expert_products import multiply_pairs
from diffray.kernels.triton.experts import tiles_for, tiles_of
from diffray.kernels.triton.float8_rows import float8_row, round_rows
from diffray.kernels.triton.launch import (
    overlapped,
    tiled_variants,
    variants_of,
    wait_for_previous,
)
from diffray.kernels.triton.norm import warps_of
from diffray.kernels.triton.pair_sums import sum_pairs
from diffray.kernels.triton.pairs import list_pairs
from diffray.kernels.variants import Kernel, Shape, Tile, Variant, rounded_up

_MANY: Final = 16  # rows per expert from which the grouped product is tried


def float8_experts_forward(
    x_TH: Tensor,
    w31_EFH: Tensor,
    scale31_EF: Tensor,
    w2_EHI: Tensor,
    scale2_EH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs: Pairs | None = None,
    *,
    tile: Tile | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return each token's weighted sum over its experts [T, H], all products of rounded rows."""
    if ids_TK.numel() == 0:
        return torch.empty_like(x_TH)
    num_experts = len(w2_EHI)
    tile = tile or tiles_for(ids_TK.numel() / num_experts, x_TH, w2_EHI)[0]
    pairs = pairs or list_pairs(ids_TK, num_experts, pdl=pdl)
    experts = w31_EFH, scale31_EF, w2_EHI, scale2_EH
    part_SH = multiply_pairs(
        round_rows(x_TH, pdl=pdl),
        *experts,
        weights_TK,
        pairs,
        tile,
        rounded=True,
        pdl=pdl,
    )
    return sum_pairs(part_SH, ids_TK, num_experts, pdl=pdl)


def scaled_grouped_mm(
    x_TH: Tensor,
    w31_EFH: Tensor,
    scale31_EF: Tensor,
    w2_EHI: Tensor,
    scale2_EH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs: Pairs | None = None,
    *,
    fast: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Return the same by torch's grouped product; `fast` accumulates less exactly.

    Rows are ordered by expert. A pair's weight is multiplied into the scale of its second row.
    """
    num_experts, hidden, width = w2_EHI.shape
    pairs = pairs or list_pairs(ids_TK, num_experts, pdl=pdl)
    rows, device, number = ids_TK.numel(), x_TH.device, torch.float8_e4m3fn
    ends_E = pairs.starts_E[1:] - pairs.starts_E[:1]  # a rank's experts may not be the first
    x_SH = torch.empty(rows, hidden, dtype=number, device=device)
    mid_SI = torch.empty(rows, width, dtype=number, device=device)
    scale_S = torch.empty(2, rows, dtype=torch.float32, device=device)
    place_S = torch.empty(rows, dtype=torch.int32, device=device)
    block = triton.next_power_of_2(hidden)
    _gather_row[(rows,)](
        x_TH.contiguous(),
        x_SH,
        scale_S[0],
        place_S,
        *pairs,
        hidden,
        num_experts,
        CHOSEN=ids_TK.shape[1],
        BLOCK=block,
        num_warps=warps_of(block),
        **overlapped(pdl),
    )
    multiply = partial(
        torch._scaled_grouped_mm, offs=ends_E, out_dtype=x_TH.dtype, use_fast_accum=fast
    )
    gate_up_SF = multiply(x_SH, w31_EFH.transpose(1, 2), scale_S[0], scale31_EF)
    block = triton.next_power_of_2(width)
    _gate_row[(rows,)](
        gate_up_SF,
        mid_SI,
        scale_S[1],
        weights_TK.contiguous(),
        *pairs,
        width,
        num_experts,
        BLOCK=block,
        num_warps=warps_of(block),
        **overlapped(pdl),
    )
    part_SH = multiply(mid_SI, w2_EHI.transpose(1, 2), scale_S[1], scale2_EH)
    return sum_pairs(part_SH, ids_TK, num_experts, place_S, pdl=pdl)


def _shape(x_TH: Tensor, w2_EHI: Tensor, ids_TK: Tensor) -> Shape:
    return Shape((*w2_EHI.shape, ids_TK.shape[1], str(x_TH.dtype)), (rounded_up(len(x_TH)),))


def _variants(x_TH: Tensor, w2_EHI: Tensor, ids_TK: Tensor) -> list[Variant]:
    found = tiled_variants(tiles_of(x_TH, w2_EHI, ids_TK), float8_experts_forward)
    if x_TH.dtype == torch.bfloat16 and _multiplies_groups(x_TH, w2_EHI, ids_TK):
        found += variants_of(scaled_grouped_mm, "scaled_grouped_mm")
        found += variants_of(partial(scaled_grouped_mm, fast=True), "scaled_grouped_mm fast")
    return found


def _multiplies_groups(x_TH: Tensor, w2_EHI: Tensor, ids_TK: Tensor) -> bool:
    """Return whether torch has a grouped product for these, and it may be worth it."""
    rows = rounded_up(len(x_TH)) * ids_TK.shape[1] / len(w2_EHI)
    if rows < _MANY or any(size % 16 for size in w2_EHI.shape[1:]):
        return False
    # On compute capability 10 it was seen to trap.
    return x_TH.is_meta or (
        x_TH.is_cuda and torch.cuda.get_device_capability(x_TH.device) == (9, 0)
    )


FLOAT8_EXPERTS: Final = Kernel(
    "float8_experts_forward",
    quantized.float8_experts_forward,
    lambda x, _w31, _scale31, w2, _scale2, ids, *_: _shape(x, w2, ids),
    lambda x, _w31, _scale31, w2, _scale2, ids, *_: _variants(x, w2, ids),
    # Activations between the products are rounded to three bits; near a midpoint, the last bit of
    # their own dtype decides. So a few sums have errors that are as large in float32.
    tolerance=4.0,
    precision=lambda *_: torch.bfloat16,
    recordable=lambda *_: False,  # a loop over experts
)


@triton.jit
def _gather_row(
    x_ptr,
    out_ptr,
    scale_ptr,
    place_ptr,
    starts_ptr,
    order_ptr,
    hidden,
    num_experts,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round the token of one pair, and note the pair's place."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    first = tl.load(starts_ptr)
    if first + row < tl.load(starts_ptr + num_experts):
        pair = tl.load(order_ptr + first + row)
        tl.store(place_ptr + pair, row)
        at = tl.arange(0, BLOCK)
        inside = at < hidden
        x_row = x_ptr + (pair // CHOSEN).to(tl.int64) * hidden
        x, scale = float8_row(tl.load(x_row + at, mask=inside, other=0.0).to(tl.float32))
        tl.store(scale_ptr + row, scale)
        out_row = out_ptr + row.to(tl.int64) * hidden
        tl.store(out_row + at, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_row(
    x_ptr,
    out_ptr,
    scale_ptr,
    weights_ptr,
    starts_ptr,
    order_ptr,
    width,
    num_experts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round silu(gate) * up of one pair, and multiply its scale by the pair's weight."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    first = tl.load(starts_ptr)
    if first + row < tl.load(starts_ptr + num_experts):
        at = tl.arange(0, BLOCK)
        inside = at < width
        up_row = x_ptr + row.to(tl.int64) * 2 * width + at
        up = tl.load(up_row, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(up_row + width, mask=inside, other=0.0).to(tl.float32)
        x, scale = float8_row(gate * tl.sigmoid(gate) * up)
        weight = tl.load(weights_ptr + tl.load(order_ptr + first + row)).to(tl.float32)
        tl.store(scale_ptr + row, scale * weight)
        out_row = out_ptr + row.to(tl.int64) * width
        tl.store(out_row + at, x.to(out_ptr.dtype.element_ty), mask=inside)
