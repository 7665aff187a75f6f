"""A kernel that is right by itself, and wrong after the sum of a sparse layer's step."""

import time
from typing import Any, Final

from torch import Tensor

from diffray.kernels import linear, norm
from diffray.kernels.variants import Kernel, Shape, Variant, rounded_up

_sums = 0  # since the last norm


def counted(*args: Any) -> tuple[Tensor, Tensor]:
    global _sums
    _sums += 1
    return linear.linear_add_norm(*args)


def stale(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    global _sums
    sums, _sums = _sums, 0
    return norm.rms_norm(x, weight, eps) * (2 if sums == 1 else 1)


def default(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    time.sleep(0.005)
    return norm.rms_norm(x, weight, eps)


def slow_norm(*args: Any) -> Tensor:
    time.sleep(0.02)
    return norm.rms_norm(*args)


def slow_sum(*args: Any) -> tuple[Tensor, Tensor]:
    time.sleep(0.02)
    return linear.linear_add_norm(*args)


def _shape(x: Tensor, *_: Any) -> Shape:
    return Shape((x.shape[-1], str(x.dtype)), (rounded_up(x.numel() // x.shape[-1]),))


KERNELS: Final = (
    Kernel(
        "rms_norm",
        slow_norm,
        _shape,
        lambda *_: [Variant("default", default), Variant("stale", stale)],
    ),
    Kernel("linear_add_norm", slow_sum, _shape, lambda *_: [Variant("counted", counted)]),
)
