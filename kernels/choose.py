"""Chooses a model's kernels: Triton's on supported GPUs, else plain torch.

The choice is made once, when the model is built for its device; the model only sees a `Kernels`
record. Triton is imported only if its kernels are chosen.
"""

from collections.abc import Callable, Set
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Final, NamedTuple

import torch
from torch import Tensor

from diffray.kernels import (
    acceptance,
    attention,
    confidence,
    credit,
    experts,
    linear,
    norm,
    quantized,
    quantized_kv,
    router,
)
from diffray.kernels.attention import KVLayer, QKRotary
from diffray.kernels.confidence import Confidence, Draw
from diffray.kernels.cpu import rows
from diffray.kernels.experts import ExpertWeights
from diffray.kernels.kernel import Kernel, Run
from diffray.kernels.quantize import Quantized
from diffray.kernels.quantized_kv import QuantizedKV
from diffray.kernels.router import Routing
from diffray.kernels.windows import PagedWindows, Windows

OPTIONS: Final = ("auto", "torch", "triton")
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_CAPABILITY: Final = (8, 0)


class Kernels(NamedTuple):
    """One implementation of everything that a step runs besides plain matrix products."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    linear_add_norm: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    quantized_linear: Callable[[Tensor, Quantized, Tensor | None], Tensor]
    attend: Callable[[Tensor, QKRotary, KVLayer, Tensor, Windows], Tensor]
    quantized_attend: Callable[[Tensor, QKRotary, QuantizedKV, Tensor, Windows], Tensor]
    softmax_router: Callable[[Tensor, Tensor, Tensor | None, int], Routing]
    grouped_sigmoid_router: Callable[..., Routing]
    experts: Callable[[Tensor, ExpertWeights, Routing], Tensor]
    experts_add_norm: Callable[..., tuple[Tensor, Tensor]]
    confidence: Callable[[Tensor, Tensor, int, int, Tensor, Draw | None], Confidence]
    confidence_of_logits: Callable[[Tensor, int, int, Tensor, Draw | None], Confidence]
    # Not called by models: credit, the end of a step, and the halves of `attend`.
    reward: Callable[..., Confidence]
    settle: Callable[..., None]
    rotate_and_store: Callable[[Tensor, QKRotary, Tensor, Tensor, Tensor], Tensor]
    paged_attention: Callable[[Tensor, Tensor, Tensor, PagedWindows], Tensor]


# Plain torch runs everywhere and is the reference for the others.
TORCH: Final = Kernels(
    "torch",
    norm.rms_norm,
    norm.add_norm,
    linear.linear_add_norm,
    quantized.quantized_linear,
    attention.attend,
    quantized_kv.quantized_attend,
    router.softmax_router,
    router.grouped_sigmoid_router,
    experts.experts,
    experts.experts_add_norm,
    confidence.confidence,
    confidence.confidence_of_logits,
    credit.reward,
    acceptance.settle,
    attention.rotate_and_store,
    attention.paged_attention,
)

# Where a program in C cannot run, torch's function does.
CPU: Final = TORCH._replace(
    rms_norm=rows.rms_norm,
    add_norm=rows.add_norm,
    linear_add_norm=rows.linear_add_norm,
    attend=rows.attend,
    confidence=partial(confidence.confidence, find=rows.extremes),
    confidence_of_logits=partial(confidence.confidence_of_logits, find=rows.extremes),
)


def choose_kernels(
    kernels: str, device: torch.device, dtype: torch.dtype, refused: Set[str] = frozenset()
) -> Kernels:
    """Return the kernels for a model of this dtype on this device; refuse impossible ones.

    "auto" is Triton's kernels if they run here, else torch's; in float32 on a CPU some of these are
    programs in C. Of the refused kernels torch's run.
    """
    if kernels not in OPTIONS:
        raise ValueError(f"kernels is {kernels!r}; expected one of {', '.join(OPTIONS)}")
    if kernels == "torch":
        return TORCH
    why_not = obstacle(device, dtype)
    if why_not is None and (kernels == "triton" or device.type == "cuda"):
        return triton_kernels(refused)
    if kernels == "triton":
        raise ValueError(f"kernels 'triton' cannot run: {why_not}, or leave kernels at 'auto'")
    return CPU if device.type == "cpu" and dtype == torch.float32 else TORCH


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Triton's kernels cannot run and what to do about it, or None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed; pip install 'diffray[triton]'"
    if dtype not in _DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        unsupported = str(dtype).removeprefix("torch.")
        return f"Triton's kernels do not support {unsupported}; choose a dtype of {names}"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _CAPABILITY:
            found = ".".join(map(str, capability))
            return f"this GPU has compute capability {found}; choose one with 8.0 or more"
        return None
    if _interpreted():
        return None
    return f"the device is {device}; choose cuda, or set TRITON_INTERPRET=1 for a slow trial"


def _interpreted() -> bool:
    """Return whether the environment variable selects Triton's interpreter on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def triton_kernels(refused: Set[str] = frozenset()) -> Kernels:
    """Return Triton's kernels, and torch's for the refused ones; compiled on the first call."""
    from diffray.kernels.triton.attention import paged_attention
    from diffray.kernels.triton.rope import rotate_and_store
    from diffray.kernels.triton.table import KERNELS

    halves = TORCH._replace(rotate_and_store=rotate_and_store, paged_attention=paged_attention)
    return with_programs(for_this_gpu(KERNELS), refused, halves)


def for_this_gpu(table: Items[Kernel]) -> list[Kernel]:
    """Return the kernels; on a GPU that can, they are launched before the previous one ends."""
    from diffray.kernels.triton.launch import can_overlap

    def early(program: Run) -> Run:
        # Asked when it runs: only then is the model's device surely the current one.
        return lambda *args, **options: program(*args, pdl=can_overlap(), **options)

    return [replace(each, program=early(each.program)) for each in table]


def with_programs(
    table: Items[Kernel], refused: Set[str] = frozenset(), others: Kernels = TORCH
) -> Kernels:
    """Return `others` with the programs of the table that are not refused."""
    used = {each.name: each.program for each in table if each.name not in refused}
    return others._replace(name="triton", **used)
