"""Kernels all of whose variants are refused; one leaves a process behind when it crashes."""

import os
import time
from typing import Any, Final

from torch import Tensor

from diffray.kernels import norm
from tests.helpers.stand_in_kernels import kernel_of


def no_compiler(*_: Any) -> Tensor:
    raise RuntimeError("Failed to find C compiler")


def leave_a_process(*_: Any) -> Tensor:
    """Crash, but not before another process holds this one's output."""
    if os.fork() == 0:
        time.sleep(600)
    os.abort()


KERNELS: Final = (kernel_of("rms_norm", norm.rms_norm, no_compiler, leave_a_process),)
