"""Root-mean-square normalisation over the last dimension.

Letters: H normalised size.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in float32 (float64 for float64), cast back, then scale; `weight` broadcasts.

    `weight` ends in H; more leading dimensions give each head its own scale.
    """
    return torch.rms_norm(x, x.shape[-1:], None, eps) * weight
