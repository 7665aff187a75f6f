"""Rows times a matrix, with the fastest library for the device.

Letters: T rows, I input columns, O output columns.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from diffray.kernels.norm import add_norm

LITTLE = 1 << 20  # multiplications; with fewer, oneDNN's call costs more than it saves
# oneDNN compiles and keeps a program for every number of rows. Above FEW, rows are padded to a
# multiple of ROUND; otherwise the programs take gigabytes and are compiled again and again.
FEW, ROUND = 64, 32


def pack(weight_OI: Tensor) -> Tensor:
    """Return the matrix in oneDNN's layout, which only `linear` reads.

    Otherwise oneDNN reorders it in each call, which takes a quarter of the time at 32 rows. If
    torch does the multiplication, the matrix is returned unchanged.
    """
    if weight_OI.dtype != torch.float32 or not _has_onednn(weight_OI):
        return weight_OI
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight_OI))


def unpack(packed: Tensor) -> Tensor:
    """Return a packed matrix as it was; a packed byte matrix has its columns first."""
    return packed.to_dense().t().contiguous() if packed.dtype == torch.int8 else packed.to_dense()


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; float32 on a CPU goes to oneDNN.

    torch itself uses MKL, which takes about twice as long on AMD's CPUs. The matrix may be packed.
    """
    work = x_TI.shape[0] * weight_OI.numel()
    if weight_OI.is_mkldnn or (
        work >= LITTLE and x_TI.dtype == torch.float32 and _has_onednn(x_TI)
    ):
        multiply = torch.ops.mkldnn._linear_pointwise.default
        padded = pad_rows(x_TI)
        return cast(Tensor, multiply(padded, weight_OI, bias_O, "none", [], ""))[: len(x_TI)]
    return functional.linear(x_TI, weight_OI, bias_O)


def pad_rows(x_TI: Tensor) -> Tensor:
    """Pad many rows to a multiple of ROUND, so that oneDNN sees few different numbers of rows."""
    num_rows = x_TI.shape[0]
    if num_rows > FEW and num_rows % ROUND:
        return functional.pad(x_TI, (0, 0, 0, -num_rows % ROUND))
    return x_TI


def linear_add_norm(
    x_TI: Tensor, weight_OI: Tensor, residual_TO: Tensor, norm_O: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the product plus the residual, which is the next residual, and its RMSNorm."""
    return add_norm(linear(x_TI, weight_OI), residual_TO, norm_O, eps)


def _has_onednn(tensor: Tensor) -> bool:
    return tensor.is_cpu and torch.backends.mkldnn.is_available()
