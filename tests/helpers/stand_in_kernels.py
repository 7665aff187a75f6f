"""Kernels that stand in for Triton's where variants are tried: right, wrong, broken, slow."""

import os
import time
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from diffray.kernels import linear, norm
from diffray.kernels.variants import Kernel, Run, Shape, Variant, rounded_up

_LONG_S = 0.02  # many times what torch takes for these sizes


def wrong(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Miss one number of one row."""
    out = norm.rms_norm(x, weight, eps)
    out.view(-1)[-1] *= 1.01
    return out


def crash(*_: Any) -> Tensor:
    os.abort()


def not_compiled(*_: Any) -> Tensor:
    raise SyntaxError("at 7:12: the stand-in does not compile")


def slow(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    time.sleep(_LONG_S)
    return norm.rms_norm(x, weight, eps)


def hang(*_: Any) -> Tensor:
    while True:
        time.sleep(1)


def right(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm.rms_norm(x, weight, eps)


def slow_sum(*args: Any) -> tuple[Tensor, Tensor]:
    time.sleep(_LONG_S)
    return linear.linear_add_norm(*args)


def kernel_of(name: str, reference: Run, *variants: Callable[..., Any]) -> Kernel:
    def shape(x: Tensor, *_: Any) -> Shape:
        size = x.shape[-1]
        return Shape((size, str(x.dtype)), (rounded_up(x.numel() // size),))

    return Kernel(name, reference, shape, lambda *_: [Variant(v.__name__, v) for v in variants])


KERNELS: Final = (
    kernel_of("rms_norm", norm.rms_norm, wrong, crash, not_compiled, slow, hang, right),
    kernel_of("linear_add_norm", linear.linear_add_norm, slow_sum),
)
