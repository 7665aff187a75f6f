"""Gated experts over tokens that each go to a few of them.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: gate
rows, then up rows), K experts of a token, S token-expert pairs (T * K).
"""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu


def experts_forward(
    x_TH: Tensor, w13_EFH: Tensor, w2_EHI: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return each token's weighted sum over its experts [T, H].

    Ids outside [0, E) name experts of other ranks and add nothing. Pairs are sorted by expert once,
    so each expert is read once and works on one contiguous slice.
    """
    num_tokens, num_chosen = ids_TK.shape
    num_experts = w13_EFH.shape[0]
    here_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    ids_S, order_S = ids_TK.where(here_TK, num_experts).flatten().sort(stable=True)
    experts_E = torch.arange(num_experts, device=ids_S.device)
    ends_E = torch.searchsorted(ids_S, experts_E, right=True, out_int32=True)

    x_SH = x_TH[order_S // num_chosen]
    gate_SI, up_SI = _grouped(x_SH, w13_EFH, ends_E).chunk(2, dim=-1)
    out_SH = _grouped(silu(gate_SI).mul_(up_SI), w2_EHI, ends_E)

    # Back to the tokens' order; summed along K, so the result does not hang on who else runs.
    read_SH = torch.empty_like(out_SH)
    read_SH[order_S] = out_SH
    read_TKH = read_SH.view(num_tokens, num_chosen, -1).masked_fill_(~here_TK.unsqueeze(-1), 0)
    mix_T1K = weights_TK.to(x_TH.dtype).unsqueeze(1)
    return torch.bmm(mix_T1K, read_TKH).squeeze(1)


def _grouped(x_SH: Tensor, w_EOH: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each expert's slice of rows with its matrix; rows of no expert are undefined."""
    row_bytes = {x_SH.shape[1] * x_SH.itemsize, w_EOH.shape[1] * x_SH.itemsize}
    if x_SH.dtype != torch.float64 and all(size % 16 == 0 for size in row_bytes):
        return grouped_mm(x_SH, w_EOH.transpose(1, 2), offs=ends_E)
    # grouped_mm knows no float64 and wants rows of 16 bytes; this is for tests on the CPU, where
    # reading the ends costs no synchronisation.
    out_SO = x_SH.new_zeros(x_SH.shape[0], w_EOH.shape[1])
    start = 0
    for expert, stop in enumerate(ends_E.tolist()):
        if start < stop:
            torch.mm(x_SH[start:stop], w_EOH[expert].t(), out=out_SO[start:stop])
        start = stop
    return out_SO
