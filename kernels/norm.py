"""Root-mean-square normalisation over the last dimension, alone or after adding a residual.

Letters: T packed tokens, H normalised size.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in float32, cast back, then scale; `weight` broadcasts.

    This is the models' definition, for float64 weights too. `weight` ends in H; more leading
    dimensions give each head its own scale.
    """
    narrow = x.float() if x.dtype == torch.float64 else x  # other dtypes are widened inside
    return torch.rms_norm(narrow, x.shape[-1:], None, eps).to(x.dtype) * weight


def rms_norm_wide(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise and scale in float32, then cast: Gemma's definition, for float64 weights too."""
    scale = None if weight is None else weight.float()
    return torch.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)


def add_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sum, which is the next residual, and its RMSNorm."""
    total_TH = residual_TH + x_TH
    return total_TH, rms_norm(total_TH, weight_H, eps)
