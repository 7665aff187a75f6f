"""Kernels all of which are refused; one leaves a process behind when it crashes."""

import os
import time
from typing import Any, Final

from tests.helpers.stand_in_kernels import kernel


def no_compiler(*_: Any, pdl: bool) -> Any:
    raise RuntimeError("Failed to find C compiler")


def leave_a_process(*_: Any, pdl: bool) -> Any:
    """Crash, but not before another process holds this one's output."""
    if os.fork() == 0:
        time.sleep(600)
    os.abort()


KERNELS: Final = kernel("rms_norm", no_compiler), kernel("attend", leave_a_process)
