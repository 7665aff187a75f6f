"""RMSNorm in Triton, alone or with the residual added first: one program per row.

Letters: T rows, H normalised size.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels import linear, norm
from diffray.kernels.kernel import Kernel
from diffray.kernels.triton.launch import overlapped, wait_for_previous


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """Normalise in float32, cast back, then scale; `weight` has one dimension."""
    assert weight.dim() == 1, "heads with a scale each are normed where they are rotated"
    x_TH = x.contiguous().view(-1, x.shape[-1])
    out_TH = torch.empty_like(x_TH)
    _launch(x_TH, None, None, out_TH, weight, eps, pdl)
    return out_TH.view(x.shape)


def add_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the sum, which is the next residual, and its RMSNorm."""
    x_TH, residual_TH = x_TH.contiguous(), residual_TH.contiguous()
    total_TH, out_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
    _launch(x_TH, residual_TH, total_TH, out_TH, weight_H, eps, pdl)
    return total_TH, out_TH


def linear_add_norm(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor,
    norm_O: Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `add_norm` of torch's product."""
    return add_norm(linear.linear(x_TI, weight_OI), residual_TO, norm_O, eps, pdl=pdl)


RMS_NORM: Final = Kernel("rms_norm", norm.rms_norm, rms_norm)
ADD_NORM: Final = Kernel("add_norm", norm.add_norm, add_norm)
LINEAR_ADD_NORM: Final = Kernel("linear_add_norm", linear.linear_add_norm, linear_add_norm)


def _launch(
    x_TH: Tensor,
    residual_TH: Tensor | None,
    total_TH: Tensor | None,
    out_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    pdl: bool,
) -> None:
    rows, size = out_TH.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(size)
    _norm_row[(rows,)](
        x_TH,
        residual_TH,
        total_TH,
        out_TH,
        weight_H,
        size,
        eps,
        ADD=residual_TH is not None,
        BLOCK=block,
        num_warps=warps_of(block),
        **overlapped(pdl),
    )


def warps_of(block: int) -> int:
    """Return the warps of a program that norms a row."""
    return min(max(block // 512, 1), 16)


@triton.jit
def _norm_row(
    x_ptr,
    residual_ptr,
    total_ptr,
    out_ptr,
    weight_ptr,
    size,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm one row; the sum is rounded to its dtype first, as it is stored."""
    at = tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * size + at
    x = tl.load(x_ptr + row, mask=inside, other=0.0)
    if ADD:
        x = rounded_sum(tl.load(residual_ptr + row, mask=inside, other=0.0), x)
        tl.store(total_ptr + row, x, mask=inside)
    tl.store(out_ptr + row, normed(x, weight, size, eps), mask=inside)


@triton.jit
def rounded_sum(a, b):
    """Return a + b in their dtype."""
    return (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)


@triton.jit
def normed(x, weight, size, eps):
    """Return a row's RMSNorm, rounded before it is scaled."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    return ((wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
