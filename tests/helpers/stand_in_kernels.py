"""Kernels that stand in for Triton's where they are checked: right, wrong and broken ones."""

import os
import time
from typing import Any, Final

import torch
from torch import Tensor

from diffray.kernels import norm
from diffray.kernels.choose import TORCH
from diffray.kernels.kernel import Kernel, Run


def wrong(x: Tensor, weight: Tensor, eps: float, *, pdl: bool) -> Tensor:
    """Miss one number of one row."""
    out = norm.rms_norm(x, weight, eps)
    out.view(-1)[-1] *= 1.01
    return out


def crash(*_: Any, pdl: bool) -> Any:
    os.abort()


def not_compiled(*_: Any, pdl: bool) -> Any:
    raise SyntaxError("at 7:12: the stand-in does not compile")


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("an illegal memory access was encountered")


def break_device(*_: Any, pdl: bool) -> Any:
    """Fail as an illegal access does: so does every later call in this process."""
    torch.ones = fail
    fail()


def until_broken(*args: Any) -> Any:
    return fail() if torch.ones is fail else TORCH.confidence(*args)


def hang(*_: Any, pdl: bool) -> Any:
    while True:
        time.sleep(1)


def right(x: Tensor, *args: Any, pdl: bool) -> Tensor:
    return TORCH.attend(x, *args)


def kernel(name: str, program: Run, **more: Any) -> Kernel:
    return Kernel(name, getattr(TORCH, name), program, **more)


KERNELS: Final = (
    kernel("rms_norm", wrong),
    kernel("linear_add_norm", not_compiled),
    kernel("softmax_router", crash),
    kernel("experts_add_norm", hang),
    Kernel("confidence", until_broken, break_device),
    kernel("attend", right, written=lambda _heads, _rotary, kv, *_: kv),
)
"""One that is refused for each reason, and one that is right."""
