"""Gated experts; each token uses a few of them.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: up
rows, then gate rows), K experts of a token, S token-expert pairs (T * K), P pairs of one expert.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from diffray.kernels.linear import LITTLE
from diffray.kernels.norm import add_norm
from diffray.kernels.quantize import Quantized, dequantize
from diffray.kernels.quantized import Kept, kept_linear
from diffray.kernels.router import Routing

Activation = Callable[[Tensor], Tensor]
Multiply = Callable[[int, Tensor], Tensor]  # takes an expert's number and its rows


class ExpertWeights(NamedTuple):
    """The matrices of all experts here, plain or quantized, and the activation between them."""

    w31_EFH: Kept
    w2_EHI: Kept
    activation: Activation = silu

    @property
    def quantized(self) -> list[Quantized]:
        return [w for w in (self.w31_EFH, self.w2_EHI) if isinstance(w, Quantized)]

    @property
    def rounds_inputs(self) -> bool:
        """Whether rows that a matrix multiplies are rounded too."""
        return any(w.format.rounds_inputs for w in self.quantized)


def experts(x_TH: Tensor, weights: ExpertWeights, routing: Routing) -> Tensor:
    """Return each token's weighted sum over its experts [T, H].

    Ids outside [0, E) name experts of other ranks and add nothing. Pairs are sorted by expert once,
    so each expert is read once and works on one contiguous slice; a router's lists are not needed.
    Of quantized matrices a CPU widens only those of chosen experts, one at a time. A GPU widens all
    of them, so that the host need not wait for the choice; it does wait if inputs are rounded.
    """
    w31_EFH, w2_EHI, activation = weights
    if x_TH.is_cuda and not weights.rounds_inputs:
        w31_EFH, w2_EHI = (
            dequantize(w, x_TH.dtype) if isinstance(w, Quantized) else w for w in (w31_EFH, w2_EHI)
        )

    def run(x_SH: Tensor, ends_E: Tensor) -> Tensor:
        match w31_EFH, w2_EHI:
            case Tensor() as w31, Tensor() as w2 if _suits_grouped(x_SH, w31, w2):
                return _grouped(x_SH, w31, w2, ends_E, activation)
        return _one_by_one(x_SH, multiply, ends_E)

    def multiply(expert: int, x_PH: Tensor) -> Tensor:
        up_PI, gate_PI = kept_linear(x_PH, w31_EFH[expert]).chunk(2, dim=-1)
        return kept_linear(activation(gate_PI).mul_(up_PI), w2_EHI[expert])

    return _routed(x_TH, run, len(w2_EHI), routing.ids_TK, routing.weights_TK)


def experts_add_norm(
    x_TH: Tensor,
    weights: ExpertWeights,
    routing: Routing,
    shared_TH: Tensor | None,
    residual_TH: Tensor,
    norm_H: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return `add_norm` of the experts' output plus that of a shared expert, if there is one."""
    out_TH = experts(x_TH, weights, routing)
    if shared_TH is not None:
        out_TH = out_TH + shared_TH
    return add_norm(out_TH, residual_TH, norm_H, eps)


def run_experts(
    x_TH: Tensor, multiply: Multiply, num_experts: int, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return the same, calling `multiply` for one expert after the other."""
    return _routed(
        x_TH,
        lambda x_SH, ends_E: _one_by_one(x_SH, multiply, ends_E),
        num_experts,
        ids_TK,
        weights_TK,
    )


def _routed(
    x_TH: Tensor,
    run: Callable[[Tensor, Tensor], Tensor],
    num_experts: int,
    ids_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Return each token's weighted sum of what `run` returns for pairs sorted by expert."""
    num_tokens, num_chosen = ids_TK.shape
    here_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    ids_S, order_S = ids_TK.where(here_TK, num_experts).flatten().sort(stable=True)
    experts_E = torch.arange(num_experts, device=ids_S.device)
    ends_E = torch.searchsorted(ids_S, experts_E, right=True, out_int32=True)

    x_SH = x_TH.index_select(0, order_S // num_chosen)
    out_SH = run(x_SH, ends_E)

    # Back to token order; summed along K, so the result is independent of the rest of the batch.
    places_S = torch.arange(len(order_S), device=order_S.device)
    places_S = torch.empty_like(order_S).index_copy_(0, order_S, places_S)
    read_TKH = out_SH.index_select(0, places_S).view(num_tokens, num_chosen, -1)
    mix_T1K = weights_TK.to(x_TH.dtype).unsqueeze(1)
    return torch.bmm(mix_T1K, read_TKH).squeeze(1)


def _suits_grouped(x_SH: Tensor, w31_EFH: Tensor, w2_EHI: Tensor) -> bool:
    """Whether grouped_mm works; on a CPU also whether its loop is faster for such short slices."""
    rows_fit = all(width * x_SH.itemsize % 16 == 0 for width in w2_EHI.shape[1:])
    if x_SH.dtype == torch.float64 or not rows_fit:
        return False
    return x_SH.is_cuda or x_SH.shape[0] * w31_EFH[0].numel() < LITTLE * w31_EFH.shape[0]


def _grouped(
    x_SH: Tensor, w31_EFH: Tensor, w2_EHI: Tensor, ends_E: Tensor, activation: Activation
) -> Tensor:
    """Return the experts' outputs; zero for rows without an expert."""
    up_SI, gate_SI = grouped_mm(x_SH, w31_EFH.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    out_SH = grouped_mm(activation(gate_SI).mul_(up_SI), w2_EHI.transpose(1, 2), offs=ends_E)
    rows_S = torch.arange(x_SH.shape[0], device=ends_E.device)
    return out_SH.masked_fill_((rows_S >= ends_E[-1]).unsqueeze(1), 0)


def _one_by_one(x_SH: Tensor, multiply: Multiply, ends_E: Tensor) -> Tensor:
    """Do the same with one call per expert; reading `ends_E` makes the host wait for a GPU."""
    ends = ends_E.tolist()
    counts = [stop - start for start, stop in pairwise([0, *ends, x_SH.shape[0]])]
    slices = enumerate(x_SH.split(counts)[:-1])
    parts = [multiply(expert, x_PH) for expert, x_PH in slices if x_PH.shape[0]]
    return torch.cat([*parts, x_SH.new_zeros(counts[-1], x_SH.shape[1])])
