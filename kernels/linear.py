"""Rows times a matrix, by the library that is fastest where they are.

Letters: T rows, I input columns, O output columns.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

LITTLE = 1 << 20  # multiplications; with fewer, oneDNN's call costs more than it saves


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x @ weight.T; float32 on a CPU goes to oneDNN.

    torch itself gives it to MKL, which takes about twice as long on AMD's CPUs.
    """
    work = x_TI.shape[0] * weight_OI.numel()
    if (
        work >= LITTLE
        and x_TI.dtype == torch.float32
        and x_TI.is_cpu
        and torch.backends.mkldnn.is_available()
    ):
        multiply = torch.ops.mkldnn._linear_pointwise.default
        return cast(Tensor, multiply(x_TI, weight_OI, None, "none", [], ""))
    return functional.linear(x_TI, weight_OI)
