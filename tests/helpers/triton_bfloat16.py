"""Lets Triton's interpreter compute in bfloat16 as a GPU does.

It holds bfloat16 as 16-bit integers: products multiply those, and casts truncate.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.triton_device import DEVICE


@contextmanager
def exact_bfloat16() -> Iterator[None]:
    """Round and multiply bfloat16 correctly; on a GPU there is nothing to do."""
    if DEVICE.type == "cuda":
        yield
        return
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def narrow(kind: Any) -> bool:
        return bool(kind.scalar == tl.bfloat16)

    def widened(x: Any) -> Any:
        if not narrow(x.dtype):
            return x
        bits = x.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def rounded(x: Any) -> Any:
        values = torch.from_numpy(np.ascontiguousarray(x.data)).float().bfloat16()
        return TensorHandle(values.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    plain = {name: getattr(InterpreterBuilder, name) for name in ("cast_impl", "create_fp_to_fp")}
    plain_dot = InterpreterBuilder.create_dot

    def cast(name: str) -> Any:
        def run(self: Any, x: Any, kind: Any, *rounding: Any) -> Any:
            x = widened(x)
            if not narrow(kind):
                return plain[name](self, x, kind, *rounding)
            if x.dtype.scalar.primitive_bitwidth == 8 and x.dtype.scalar.is_floating():
                x = plain["create_fp_to_fp"](self, x, tl.float32, None)
            return rounded(x)

        return run

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain_dot(self, widened(a), widened(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        for name in plain:
            patch.setattr(InterpreterBuilder, name, cast(name))
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield
