"""Gated experts whose inputs are float8 rows too.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: up
rows, then gate rows), K experts of a token, S token-expert pairs (T * K).
"""

from typing import Final

import torch
from torch import Tensor

from diffray.kernels import quantized
from diffray.kernels.kernel import Kernel
from diffray.kernels.router import Pairs
from diffray.kernels.triton.expert_products import multiply_pairs
from diffray.kernels.triton.experts import tile_for
from diffray.kernels.triton.float8_rows import round_rows
from diffray.kernels.triton.pair_sums import sum_pairs
from diffray.kernels.triton.pairs import list_pairs


def float8_experts_forward(
    x_TH: Tensor,
    w31_EFH: Tensor,
    scale31_EF: Tensor,
    w2_EHI: Tensor,
    scale2_EH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    pairs: Pairs | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return each token's weighted sum over its experts [T, H], all products of rounded rows."""
    if ids_TK.numel() == 0:
        return torch.empty_like(x_TH)
    num_experts = len(w2_EHI)
    tile = tile_for(ids_TK.numel() / num_experts, x_TH, w2_EHI)
    pairs = pairs or list_pairs(ids_TK, num_experts, pdl=pdl)
    experts = w31_EFH, scale31_EF, w2_EHI, scale2_EH
    part_SH = multiply_pairs(
        round_rows(x_TH, pdl=pdl),
        *experts,
        weights_TK,
        pairs,
        tile,
        rounded=True,
        pdl=pdl,
    )
    return sum_pairs(part_SH, ids_TK, num_experts, pdl=pdl)


FLOAT8_EXPERTS: Final = Kernel(
    "float8_experts_forward",
    quantized.float8_experts_forward,
    float8_experts_forward,
    # Activations between the products are rounded to three bits; near a midpoint, the last bit of
    # their own dtype decides. So a few sums have errors that are as large in float32.
    tolerance=4.0,
    precision=lambda *_: torch.bfloat16,
)
