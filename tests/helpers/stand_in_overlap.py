"""A kernel that is right by itself, and wrong after the sum of a sparse layer's step."""

import time
from typing import Any, Final

from torch import Tensor

from diffray.kernels import linear, norm
from tests.helpers.stand_in_kernels import kernel_of, slow, slow_sum

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


KERNELS: Final = (
    kernel_of("rms_norm", slow, default, stale),
    kernel_of("linear_add_norm", slow_sum, counted),
)
