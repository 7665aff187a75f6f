"""Experts whose weights are stored in a byte each, with a scale for every row.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I), O
output rows, K experts of a token.
"""

import torch
from torch import Tensor

from diffray.kernels.experts import experts_forward


def quantize_rows(w_EOI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weights in int8 or float8_e4m3fn, and the float32 scale of each row [E, O]."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale_EO = w_EOI.float().abs().amax(dim=2).clamp(min=1e-12) / largest
    scaled_EOI = w_EOI.float() / scale_EO.unsqueeze(2)
    if dtype == torch.int8:
        scaled_EOI = scaled_EOI.round()
    return scaled_EOI.to(dtype), scale_EO


def quantized_experts_forward(
    x_TH: Tensor,
    w13_EFH: Tensor,
    scale13_EF: Tensor | None,
    w2_EHI: Tensor,
    scale2_EH: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Return what `experts_forward` does, of weights that are quantized where they have scales."""
    w13, w2 = (
        w if scale is None else (w.float() * scale.unsqueeze(2)).to(x_TH.dtype)
        for w, scale in ((w13_EFH, scale13_EF), (w2_EHI, scale2_EH))
    )
    return experts_forward(x_TH, w13, w2, ids_TK, weights_TK)
