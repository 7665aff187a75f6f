"""Compiles passes.c if there is a C compiler, and calls it with tensors.

Without a compiler `load()` returns None, and the recipe uses torch instead.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("passes.c")
# Not -ffast-math itself: gcc before 13 then links code that flushes subnormal numbers to 0 in the
# whole process that loads the library.
FLAGS = (
    "-O3 -march=native -fno-math-errno -fno-trapping-math -fno-signed-zeros -ffinite-math-only "
    "-fassociative-math -freciprocal-math -fPIC -shared"
)


class Sizes(ctypes.Structure):
    """The sizes of attention, as in passes.c."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("rows", "length", "heads", "key_heads")),
        *((name, ctypes.c_long) for name in ("dim", "half", "block")),
        ("eps", ctypes.c_float),
    ]  # fmt: skip


class Passes:
    """The functions of passes.c; a tensor is passed as the address of its memory."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def call(self, name: str, *values: Tensor | Sizes | int | float | None) -> None:
        self.library[name](*[_argument(value) for value in values])


def _argument(value: Tensor | Sizes | int | float | None) -> object:
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        assert value.dtype in (torch.float32, torch.int64)
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, Sizes):
        return ctypes.byref(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    return value if value is None else ctypes.c_long(value)


@functools.cache
def load() -> Passes | None:
    """Return passes.c, compiled once for this source and processor; None without a compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    built_for = f"{FLAGS} {torch.cpu.get_capabilities()}"
    key = hashlib.sha256(SOURCE.read_bytes() + built_for.encode())
    path = Path(tempfile.gettempdir()) / f"train-demo-{os.getuid()}-{key.hexdigest()[:16]}.so"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [compiler, *FLAGS.split(), str(SOURCE), "-o", str(unfinished), "-lm"], check=True
        )
        unfinished.replace(path)
    return Passes(path)
