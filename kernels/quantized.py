"""Experts with weights of one byte each and a scale per row.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I), O
output rows, K experts of a token.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from diffray.kernels.experts import Activation, experts_forward
from diffray.kernels.norm import add_norm
from diffray.kernels.router import Pairs


def quantize_rows(w_EOI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weights in int8 or float8_e4m3fn, and the float32 scale of each row [E, O]."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    values_EOI = torch.empty_like(w_EOI, dtype=dtype)
    scale_EO = torch.empty(w_EOI.shape[:2], device=w_EOI.device)
    # One expert at a time: all of them in float32 would take several times the final size.
    for w_OI, values_OI, scale_O in zip(w_EOI, values_EOI, scale_EO, strict=True):
        wide_OI = w_OI.float()
        scale_O.copy_(wide_OI.abs().amax(dim=1).clamp(min=1e-12) / largest)
        scaled_OI = wide_OI / scale_O.unsqueeze(1)
        values_OI.copy_(scaled_OI.round() if dtype == torch.int8 else scaled_OI)
    return values_EOI, scale_EO


def quantized_experts_forward(
    x_TH: Tensor,
    w13_EFH: Tensor,
    scale13_EF: Tensor | None,
    w2_EHI: Tensor,
    scale2_EH: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
    _pairs: Pairs | None = None,
    activation: Activation = silu,
) -> Tensor:
    """Return `experts_forward` for weights of which those with scales are quantized."""
    w13, w2 = (
        w if scale is None else (w.float() * scale.unsqueeze(2)).to(x_TH.dtype)
        for w, scale in ((w13_EFH, scale13_EF), (w2_EHI, scale2_EH))
    )
    return experts_forward(x_TH, w13, w2, ids_TK, weights_TK, activation=activation)


def experts_add_norm(
    x_TH: Tensor,
    w13_EFH: Tensor,
    scale13_EF: Tensor | None,
    w2_EHI: Tensor,
    scale2_EH: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs: Pairs | None,
    shared_TH: Tensor | None,
    residual_TH: Tensor,
    norm_H: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return `add_norm` of the experts' output, to which a shared expert's is added first."""
    experts = w13_EFH, scale13_EF, w2_EHI, scale2_EH
    out_TH = quantized_experts_forward(x_TH, *experts, ids_TK, weights_TK, pairs)
    if shared_TH is not None:
        out_TH = out_TH + shared_TH
    return add_norm(out_TH, residual_TH, norm_H, eps)
