"""Norm and rotary embedding with gradients written by hand, in fewer passes over memory.

Shapes: B batch, L length, h heads, D size of a head, R half of its rotated part.
"""

from typing import Any

import torch
from torch import Tensor


class RmsNorm(torch.autograd.Function):
    """The root-mean-square norm, in half of the passes over memory that autograd takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = square.add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        y: Tensor = normed * weight
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        inner = gradients[0] * weight
        along = (inner * normed).mean(-1, keepdim=True)
        of_weight = (gradients[0] * normed).flatten(0, -2).sum(0)
        of_x: Tensor = inner.addcmul_(normed, along, value=-1).mul_(scale)
        return of_x, of_weight, None


class Rotate(torch.autograd.Function):
    """Rotary embedding by halves over the first dimensions; the rest passes through.

    The gradient turns back by the same angle.
    """

    @staticmethod
    def forward(ctx: Any, x_BLhD: Tensor, cos_L1R: Tensor, sin_L1R: Tensor) -> Tensor:
        ctx.save_for_backward(cos_L1R, sin_L1R)
        return turn(x_BLhD, cos_L1R, sin_L1R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_L1R, sin_L1R = ctx.saved_tensors
        return turn(gradients[0], cos_L1R, -sin_L1R), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y: Tensor = RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return y


def rotate(x_BLhD: Tensor, cos_L1R: Tensor, sin_L1R: Tensor) -> Tensor:
    y: Tensor = Rotate.apply(x_BLhD, cos_L1R, sin_L1R)  # type: ignore[no-untyped-call]
    return y


def turn(x_BLhD: Tensor, cos_L1R: Tensor, sin_L1R: Tensor) -> Tensor:
    half = cos_L1R.shape[-1]
    out = torch.empty_like(x_BLhD, memory_format=torch.contiguous_format)
    a, b = x_BLhD[..., :half], x_BLhD[..., half : 2 * half]
    torch.mul(a, cos_L1R, out=out[..., :half]).addcmul_(b, sin_L1R, value=-1)
    torch.mul(b, cos_L1R, out=out[..., half : 2 * half]).addcmul_(a, sin_L1R)
    out[..., 2 * half :] = x_BLhD[..., 2 * half :]
    return out
