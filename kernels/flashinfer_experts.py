"""Gated experts by FlashInfer's call of CUTLASS, where FlashInfer is installed.

Letters: T packed tokens, H hidden size, E experts here, I expert intermediate size (F = 2I: up
rows, then gate rows), K experts of a token.
"""

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor

from diffray.kernels.router import Pairs


@cache
def installed_version() -> str:
    """Return FlashInfer's version; empty if it is not here, or without its compiled kernels.

    Without those it would compile for minutes, longer than a first start may take.
    """
    here = all(find_spec(name) for name in ("flashinfer", "flashinfer_jit_cache"))
    return version("flashinfer-python") if here else ""


def can_run(x_TH: Tensor, w31_EFH: Tensor, w2_EHI: Tensor) -> bool:
    """Return whether it has a kernel for these: 16-bit numbers in rows of whole 16 bytes."""
    if x_TH.dtype != w31_EFH.dtype or x_TH.dtype not in (torch.bfloat16, torch.float16):
        return False
    return bool(installed_version()) and not any(size % 8 for size in w2_EHI.shape[1:])


def experts_forward(
    x_TH: Tensor,
    w31_EFH: Tensor,
    w2_EHI: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    _pairs: Pairs | None = None,
) -> Tensor:
    """Return each token's weighted sum over its experts [T, H]; ids outside [0, E) add nothing.

    The sum has a kernel of its own: in the product's, additions are atomic, and so their order
    would differ from run to run.
    """
    out_TH = torch.empty_like(x_TH)
    if x_TH.numel() == 0:
        return out_TH
    from flashinfer.fused_moe import cutlass_fused_moe

    cutlass_fused_moe(
        x_TH.contiguous(),
        ids_TK.int(),
        weights_TK.float(),
        w31_EFH,
        w2_EHI,
        x_TH.dtype,
        [],
        output=out_TH,
        use_fused_finalize=False,
    )
    return out_TH
