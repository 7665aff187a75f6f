"""A kernel that is right by itself, and wrong after the sum of a sparse layer's step."""

from typing import Any, Final

from torch import Tensor

from diffray.kernels import linear, norm
from diffray.kernels.kernel import Kernel
from tests.helpers.stand_in_kernels import kernel

_sums = 0  # since the last norm, or since a sum was checked


def checked(*args: Any) -> tuple[Tensor, Tensor]:
    global _sums
    _sums = 0
    return linear.linear_add_norm(*args)


def counted(*args: Any, pdl: bool) -> tuple[Tensor, Tensor]:
    global _sums
    _sums += 1
    return linear.linear_add_norm(*args)


def stale(x: Tensor, weight: Tensor, eps: float, *, pdl: bool) -> Tensor:
    global _sums
    sums, _sums = _sums, 0
    return norm.rms_norm(x, weight, eps) * (2 if sums == 1 else 1)


KERNELS: Final = kernel("rms_norm", stale), Kernel("linear_add_norm", checked, counted)
