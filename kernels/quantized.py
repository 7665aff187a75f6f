"""Products with quantized matrices.

Letters: T packed tokens, I input columns, O output rows, E experts here.
"""

from functools import cache
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn import functional

from diffray.kernels.cpu import blocks
from diffray.kernels.linear import linear, pad_rows
from diffray.kernels.quantize import (
    Quantized,
    dequantize,
    numbers,
    quantize_rows,
    round_rows,
)

Kept = Tensor | Quantized

_BLOCK: Final = 1 << 20  # weights to widen at a time on a CPU: they stay in its cache
# The sum of this many products of two bytes is less than 2**24, up to which float32 is exact.
_EXACT: Final = 1024
_LEAST_ROWS: Final = 8  # with fewer, AMX's product of signed bytes is slow for some widths
_INT8_UNITS: Final = ("avx512_vnni", "avx_vnni", "amx_int8")


def quantized_linear(x_TI: Tensor, kept: Quantized, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias.

    The weights are widened to the dtype of x as they are used. For w8a8, w8a8_fp8 and tiles of
    blocks rows of x are rounded to bytes too; products of integers are summed as they are, and
    float8 is widened.
    """
    if kept.is_tiled:
        return blocks.Product(kept)(x_TI, bias_O)
    if kept.format.kind == "w8a8":
        out_TO = _integer_linear(x_TI, kept)
    elif kept.format.rounds_inputs:
        out_TO = _float8_linear(x_TI, kept)
    elif x_TI.is_cuda:
        return functional.linear(x_TI, dequantize(kept, x_TI.dtype), bias_O)
    else:
        parts = (linear(x_TI, dequantize(rows, x_TI.dtype)) for rows in _blocks(kept))
        out_TO = torch.cat([*parts], dim=1)
    return out_TO if bias_O is None else out_TO.add_(bias_O)


def _blocks(kept: Quantized) -> list[Quantized]:
    """Return views of the matrix's rows; on a CPU in parts that fit its cache."""
    if kept.values_EOI.is_cuda:
        return [kept]
    rows, columns = kept.shape
    step = max(_BLOCK // columns, 1)
    parts = [slice(start, start + step) for start in range(0, rows, step)]
    return [blocks.read_rows(kept, part) if kept.is_tiled else kept[part] for part in parts]


def sum_rows(weights_RV: Tensor, kept: Quantized) -> Tensor:
    """Return weights @ matrix, for each row of weights the weighted sum of the matrix's rows."""
    out_RH = weights_RV.new_zeros(len(weights_RV), kept.shape[-1])
    parts = _blocks(kept)
    shares = weights_RV.split([len(rows) for rows in parts], dim=1)
    for share, rows in zip(shares, parts, strict=True):
        out_RH.addmm_(share, dequantize(rows, weights_RV.dtype))
    return out_RH


def _integer_linear(x_TI: Tensor, kept: Quantized) -> Tensor:
    """Return the product of rounded rows; sums are exact, so rows do not affect each other."""
    rounded_TI, scale_T1 = quantize_rows(x_TI)
    values_OI, scale_O = kept.values_EOI, kept.scale_EOG.squeeze(1)
    if values_OI.is_mkldnn:
        scaled_TO = _packed_product(rounded_TI, values_OI, scale_O)
    else:
        sums_TO = integer_product(rounded_TI, values_OI).to(scale_T1.dtype)
        scaled_TO = sums_TO.mul_(scale_O)
    return scaled_TO.mul_(scale_T1).to(x_TI.dtype)


def _float8_linear(x_TI: Tensor, kept: Quantized) -> Tensor:
    """Return the product of rounded rows, scaled after summing.

    Products of float8 numbers are multiples of 2**-18 and less than 2**18, so float64 sums 2**17
    of them exactly, and rows do not affect each other.
    """
    # Unscaled sums are too large for float16.
    wide = torch.float32 if x_TI.dtype == torch.float16 else x_TI.dtype
    rounded_TI = round_rows(x_TI.to(wide))
    parts = (linear(rounded_TI, numbers(rows).to(wide)) for rows in _blocks(kept))
    sums_TO = torch.cat([*parts], dim=1)
    return sums_TO.mul_(kept.scale_EOG.squeeze(1)).to(x_TI.dtype)


def integer_product(x_TI: Tensor, w_OI: Tensor) -> Tensor:
    """Return x @ w.T of bytes in int32, on the device's unit for products of bytes.

    A CPU without one multiplies them in float32, few enough at a time to be exact.
    """
    if x_TI.is_cuda:
        return _int_mm_on_gpu(x_TI, w_OI)
    if multiplies_bytes():
        num_rows = x_TI.shape[0]
        return torch._int_mm(pad_rows(x_TI), w_OI.t())[:num_rows]
    return _in_float32(x_TI, w_OI)


def pack_bytes(values_EOI: Tensor) -> Tensor:
    """Return a matrix of bytes in the layout of oneDNN's byte product; `unpack` undoes it.

    Otherwise oneDNN reorders it in each call, which takes half of the time at 32 rows. Matrices of
    experts, matrices on a GPU, and those on a CPU where oneDNN's sums saturate stay unchanged.
    """
    if not values_EOI.is_cpu or values_EOI.dim() != 2 or not multiplies_bytes():
        return values_EOI
    return cast(Tensor, torch.ops.onednn.qlinear_prepack(values_EOI, None))


def _packed_product(x_TI: Tensor, packed_IO: Tensor, scale_O: Tensor) -> Tensor:
    """Return the product with a packed matrix times the scales of its rows, in float32."""
    padded_TI = pad_rows(x_TI)
    if _shifts_exactly():
        found_TO = _onednn_product(padded_TI.view(torch.uint8) ^ 0x80, 128, packed_IO, scale_O)
    else:
        if len(x_TI) < _LEAST_ROWS:
            padded_TI = functional.pad(x_TI, (0, 0, 0, _LEAST_ROWS - len(x_TI)))
        found_TO = _onednn_product(padded_TI, 0, packed_IO, scale_O)
    return found_TO[: len(x_TI)]


def _onednn_product(x_TI: Tensor, zero: int, packed_IO: Tensor, scale_O: Tensor) -> Tensor:
    weights = packed_IO, scale_O, torch.zeros(len(scale_O), dtype=torch.int64)
    multiply = torch.ops.onednn.qlinear_pointwise.default
    # Without a bias, an output scale, or an operation after the product.
    found = multiply(x_TI, 1.0, zero, *weights, None, 1.0, 0, torch.float32, "none", [], "")
    return cast(Tensor, found)


@cache
def _shifts_exactly() -> bool:
    """Return whether products of activations that are shifted by 128, their zero point, are exact.

    VNNI multiplies signed weights by unsigned activations, and oneDNN takes the zero point away
    from sums in int32. AMX multiplies signed bytes as well; there it takes the zero point away in
    float32, which rounds the larger sums of shifted activations.
    """
    x_TI, w_OI = (torch.full((32, 1040), 127, dtype=torch.int8) for _ in range(2))
    x_TI[:, 0] = 126
    packed_IO, scale_O = pack_bytes(w_OI), torch.ones(32)
    found_TO = _onednn_product(x_TI.view(torch.uint8) ^ 0x80, 128, packed_IO, scale_O)
    return bool((found_TO == 127 * (126 + 1039 * 127)).all())


@cache
def multiplies_bytes() -> bool:
    """Return whether this CPU has a unit for products of bytes, VNNI or AMX, and oneDNN uses it.

    Otherwise oneDNN's sums of bytes saturate, for example if ONEDNN_MAX_CPU_ISA excludes the unit.
    """
    known = torch.cpu.get_capabilities()
    if not any(known.get(name) for name in _INT8_UNITS):
        return False
    x, w = (torch.full((32, 64), value, dtype=torch.int8) for value in (127, -127))
    return bool((torch._int_mm(x, w.t()) == 64 * 127 * -127).all())


def _in_float32(x_TI: Tensor, w_OI: Tensor) -> Tensor:
    columns = w_OI.shape[1]
    out_TO = torch.zeros(len(x_TI), len(w_OI), dtype=torch.int32)
    step = max(_BLOCK // min(columns, _EXACT), 1)
    for first in range(0, columns, _EXACT):
        x_TC = x_TI[:, first : first + _EXACT].float()
        for row in range(0, len(w_OI), step):
            w_RC = w_OI[row : row + step, first : first + _EXACT].float()
            out_TO[:, row : row + step].add_(linear(x_TC, w_RC).to(torch.int32))
    return out_TO


def _int_mm_on_gpu(x_TI: Tensor, w_OI: Tensor) -> Tensor:
    """Multiply padded matrices: the GPU needs more than 16 rows, and sizes in multiples of 8."""
    rows, outputs = len(x_TI), len(w_OI)
    below, beside, right = max(17 - rows, 0), -x_TI.shape[1] % 8, -outputs % 8
    x_TI = functional.pad(x_TI, (0, beside, 0, below))
    w_OI = functional.pad(w_OI, (0, beside, 0, right))
    return torch._int_mm(x_TI, w_OI.t())[:rows, :outputs]


def kept_linear(x_TI: Tensor, w_OI: Kept) -> Tensor:
    """Return x @ w.T for a matrix that may be quantized."""
    return quantized_linear(x_TI, w_OI) if isinstance(w_OI, Quantized) else linear(x_TI, w_OI)
