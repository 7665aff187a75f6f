"""Matrices in GGUF's blocks on a CPU: their layout in tiles, and products of integers with them.

The program is compiled for the processor when it is first needed. Where it cannot be, torch widens
the weights instead.

Letters: T packed tokens, I input columns, O output rows, G blocks of a row, N rows that are read.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from diffray.kernels.quantize import Quantized, numbers, pack_nibbles

log = logging.getLogger(__name__)

_KINDS: Final = {"q8_0": 0, "q4_0": 1, "q4_1": 2}
_FOUR: Final = 4  # numbers that are multiplied together
_FLAGS: Final = {"AVX2": ("-mavx2", "-mfma", "-mf16c"), "AVX512": ("-march=native",)}
_COMPILE_SECONDS: Final = 60


def tiled(kept: Quantized) -> Quantized:
    """Return a matrix in the layout of `product`, or as it is where that does not run."""
    program = _program() if kept.values_EOI.is_cpu and kept.values_EOI.dim() == 2 else None
    if program is None or kept.shape[0] % program.lanes():
        return kept
    lanes = program.lanes()
    # Blocks of fours, and of each four one of every row.
    found = numbers(kept).view(torch.uint8).unflatten(0, (-1, lanes)).unflatten(-1, (-1, 8, _FOUR))
    found = found.permute(0, 2, 3, 1, 4)
    if kept.format.bits == 4:
        found = found[:, :, 0::2] | (found[:, :, 1::2] << 4)
    else:
        found = found ^ program.shift()
    scales = (
        None if each is None else each.unflatten(0, (-1, lanes)).transpose(1, 2).contiguous()
        for each in (kept.scale_EOG, kept.zero_EOG)
    )
    scale, minimum = scales
    assert scale is not None
    return Quantized(kept.format, found.contiguous(), scale, minimum)


def read_rows(kept: Quantized, index: Tensor | slice) -> Quantized:
    """Return rows of a tiled matrix in the usual layout."""
    program = _program()
    assert program is not None, "a tiled matrix"
    row_N = torch.arange(kept.shape[0])[index] if isinstance(index, slice) else index
    tile_N, lane_N = row_N // program.lanes(), row_N % program.lanes()
    found = kept.values_EOI[tile_N, :, :, lane_N]  # [N, G, fours or pairs of them, 4]
    if kept.format.bits == 4:
        found = torch.stack([found & 15, found >> 4], dim=3).flatten(2, 3)
        values = pack_nibbles(found.flatten(1))
    else:
        values = (found.flatten(1) ^ program.shift()).view(torch.int8)
    minimum = None if kept.zero_EOG is None else kept.zero_EOG[tile_N, :, lane_N]
    return Quantized(kept.format, values, kept.scale_EOG[tile_N, :, lane_N], minimum)


class Product:
    """x @ weight.T for a tiled matrix; every 32 numbers of a row are rounded to bytes."""

    def __init__(self, kept: Quantized) -> None:
        program, minimum = _program(), kept.zero_EOG
        assert program is not None and kept.is_tiled
        self.kept, self.rows, self.run = kept, kept.shape[0], program.block_product
        self.matrix = (
            kept.values_EOI.data_ptr(),
            kept.scale_EOG.data_ptr(),
            None if minimum is None else minimum.data_ptr(),
            self.rows,
            kept.scale_EOG.shape[1],
            _KINDS[kept.format.kind],
        )

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        wide_TI = x_TI if x_TI.dtype == torch.float32 else x_TI.float()
        wide_TI = wide_TI.contiguous()
        count = wide_TI.shape[0]
        out_TO = torch.empty(count, self.rows)
        threads = torch.get_num_threads()
        if not self.run(wide_TI.data_ptr(), count, *self.matrix, out_TO.data_ptr(), threads):
            raise MemoryError(f"no memory to round {count} rows")
        if bias_O is not None:
            out_TO.add_(bias_O)
        return out_TO if x_TI.dtype == torch.float32 else out_TO.to(x_TI.dtype)


@cache
def _program() -> ctypes.CDLL | None:
    """Return the compiled program; None where there is no compiler, or no AVX2."""
    flags = _FLAGS.get(torch.backends.cpu.get_cpu_capability())
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if flags is None or platform.machine() != "x86_64":
        return None
    if compiler is None:
        log.warning("no C compiler (CC, or gcc): weights in blocks are widened, which is slower")
        return None
    try:
        program = ctypes.CDLL(str(_compiled(compiler, flags)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning("weights in blocks are widened, which is slower; %s failed: %s", compiler, said)
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    program.block_product.argtypes = [
        *(pointer, count, pointer, pointer, pointer, count, count),
        *(ctypes.c_int, pointer, ctypes.c_int),
    ]
    return program


def _compiled(compiler: str, flags: tuple[str, ...]) -> Path:
    """Return the library, which is compiled once for each kind of processor."""
    source = files(__package__) / "blocks.c"
    said = [source.read_text(), compiler, *flags, _processor()]
    name = hashlib.sha256("\0".join(said).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    library = Path(home) / "diffray" / "kernels" / f"blocks-{name}.so"
    if library.is_file():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".", dir=library.parent))
    except OSError:
        work = Path(tempfile.mkdtemp(prefix="diffray-kernels-"))
        library = work.with_suffix(".so")
    try:
        made = work / "blocks.so"
        command = [compiler, "-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp", *flags]
        subprocess.run(
            [*command, str(source), "-o", str(made), "-lm"],
            check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS,
        )  # fmt: skip
        made.rename(library)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return library


def _processor() -> str:
    """Return what identifies the processor: a home folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())
