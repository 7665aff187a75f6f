"""Which kernels a device gets: Triton's on a GPU that they are written for, else plain torch.

Triton is imported only where its kernels are chosen. The two sets have equal signatures.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.kernels import experts, norm, router
from diffray.kernels.triton import reference
from diffray.kernels.triton.reference import Confidence, Draw, PagedWindows


class Kernels(NamedTuple):
    """One implementation of everything that a step runs beside dense matrix products."""

    name: str  # for the log: what was chosen
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate_and_store: Callable[
        [Tensor, Tensor | None, float, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor
    ]
    paged_attention: Callable[[Tensor, Tensor, Tensor, PagedWindows], Tensor]
    softmax_topk: Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
    grouped_sigmoid_topk: Callable[..., tuple[Tensor, Tensor]]
    experts_forward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    quantized_experts_forward: Callable[
        [Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor, Tensor], Tensor
    ]
    confidence: Callable[[Tensor, Tensor, int, int, Tensor, Draw | None], Confidence]
    confidence_of_logits: Callable[[Tensor, int, int, Tensor, Draw | None], Confidence]


def choose_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the kernels for a model of this dtype on this device.

    Triton's take 16 and 32 bit floats, on GPUs of compute capability 8.0 and up.
    """
    if (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16, torch.float32)
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and find_spec("triton") is not None
    ):
        return triton_kernels()
    return torch_kernels()


def torch_kernels() -> Kernels:
    """Return plain torch, which runs everywhere and defines what the others compute."""
    return Kernels(
        "torch",
        norm.rms_norm,
        reference.add_norm,
        reference.rotate_and_store,
        reference.paged_attention,
        router.softmax_topk,
        router.grouped_sigmoid_topk,
        experts.experts_forward,
        reference.quantized_experts_forward,
        reference.confidence,
        reference.confidence_of_logits,
    )


def triton_kernels() -> Kernels:
    """Return Triton's kernels; they are compiled when they are first called."""
    from diffray.kernels.triton.attention import paged_attention
    from diffray.kernels.triton.confidence import confidence, confidence_of_logits
    from diffray.kernels.triton.experts import experts_forward, quantized_experts_forward
    from diffray.kernels.triton.norm import add_norm, rms_norm
    from diffray.kernels.triton.rope import rotate_and_store
    from diffray.kernels.triton.router import grouped_sigmoid_topk, softmax_topk

    return Kernels(
        "triton",
        rms_norm,
        add_norm,
        rotate_and_store,
        paged_attention,
        softmax_topk,
        grouped_sigmoid_topk,
        experts_forward,
        quantized_experts_forward,
        confidence,
        confidence_of_logits,
    )
