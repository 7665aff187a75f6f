"""Gated experts; each token uses a few of them.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: up
rows, then gate rows), K experts of a token, S token-expert pairs (T * K), P pairs of one expert.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from diffray.kernels.linear import LITTLE, linear
from diffray.kernels.router import Pairs

Activation = Callable[[Tensor], Tensor]
Multiply = Callable[[int, Tensor], Tensor]  # takes an expert's number and its rows


def experts_forward(
    x_TH: Tensor,
    w31_EFH: Tensor,
    w2_EHI: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    _pairs: Pairs | None = None,
    activation: Activation = silu,
) -> Tensor:
    """Return each token's weighted sum over its experts [T, H].

    Ids outside [0, E) name experts of other ranks and add nothing. Pairs are sorted by expert once,
    so each expert is read once and works on one contiguous slice; a router's lists are not needed.
    """

    def run(x_SH: Tensor, ends_E: Tensor) -> Tensor:
        if _suits_grouped(x_SH, w31_EFH, w2_EHI):
            return _grouped(x_SH, w31_EFH, w2_EHI, ends_E, activation)
        return _one_by_one(x_SH, multiply, ends_E)

    def multiply(expert: int, x_PH: Tensor) -> Tensor:
        up_PI, gate_PI = linear(x_PH, w31_EFH[expert]).chunk(2, dim=-1)
        return linear(activation(gate_PI).mul_(up_PI), w2_EHI[expert])

    return _routed(x_TH, run, len(w2_EHI), ids_TK, weights_TK)


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
