"""Kernels all of whose variants are refused; one leaves a process behind when it crashes.

A process that tries kernels imports this module by its name.
"""

import os
import time
from typing import Any, Final

from torch import Tensor

from diffray.kernels import norm
from diffray.kernels.variants import Kernel, Shape, Variant, rounded_up


def no_compiler(*_: Any) -> Tensor:
    raise RuntimeError("Failed to find C compiler")


def leave_a_process(*_: Any) -> Tensor:
    """Crash, but not before another process holds this one's output."""
    if os.fork() == 0:
        time.sleep(600)
    os.abort()


def _shape(x: Tensor, *_: Any) -> Shape:
    return Shape((x.shape[-1], str(x.dtype)), (rounded_up(x.numel() // x.shape[-1]),))


def _variants(*_: Any) -> list[Variant]:
    return [Variant("no compiler", no_compiler), Variant("leave a process", leave_a_process)]


KERNELS: Final = (Kernel("rms_norm", norm.rms_norm, _shape, _variants),)
