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
import shlex
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from diffray.kernels.quantize import Quantized, numbers, pack_nibbles
from diffray.kernels.user_cache import cache_folder

log = logging.getLogger(__name__)

_KINDS: Final = {"q8_0": 0, "q4_0": 1, "q4_1": 2}
_FOUR: Final = 4  # numbers that are multiplied together
_FLAGS: Final = {"AVX2": ("-mavx2", "-mfma", "-mf16c"), "AVX512": ("-march=native",)}
_COMPILE_SECONDS: Final = 60
_ROWS: Final = 1024  # a multiple of all lanes


def tiled(kept: Quantized) -> Quantized:
    """Return a matrix in the layout of `Product`, or as it is where that does not run."""
    program = _program() if kept.values_EOI.is_cpu and kept.values_EOI.dim() == 2 else None
    rows, columns = kept.shape[-2:]
    if program is None or rows % program.lanes():
        return kept
    lanes, blocks = program.lanes(), columns // 32
    values = torch.empty((rows // lanes, blocks, kept.format.bits, lanes, _FOUR), dtype=torch.uint8)
    for first in range(0, rows, _ROWS):  # a part at a time, as this takes several times its memory
        found = numbers(kept[first : first + _ROWS]).view(torch.uint8)
        # Blocks of fours, and of each four one of every row.
        found = found.unflatten(0, (-1, lanes)).unflatten(-1, (-1, 8, _FOUR)).permute(0, 2, 3, 1, 4)
        if kept.format.bits == 4:
            found = found[:, :, 0::2] | (found[:, :, 1::2] << 4)
        else:
            found = found ^ program.shift()
        values[first // lanes : (first + _ROWS) // lanes] = found

    def in_tiles(each_OG: Tensor) -> Tensor:
        tiles: Tensor = each_OG.unflatten(0, (-1, lanes)).transpose(1, 2)
        return tiles.contiguous()

    minimum = None if kept.zero_EOG is None else in_tiles(kept.zero_EOG)
    return Quantized(kept.format, values, in_tiles(kept.scale_EOG), minimum)


def untiled(kept: Quantized) -> Quantized:
    """Return a tiled matrix in the usual layout."""
    found = Quantized.empty(kept.shape, kept.format, "cpu")
    for first in range(0, len(kept), _ROWS):
        part = slice(first, first + _ROWS)
        found[part].copy_(read_rows(kept, part))
    return found


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
        self.kept, self.run = kept, program.block_product
        self.rows, self.columns = kept.shape
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
        count, columns = wide_TI.shape
        assert columns == self.columns, f"{columns} columns"  # the program does not look
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
    if flags is None or platform.machine() != "x86_64":
        return None
    compiler = shlex.split(os.environ.get("CC") or "gcc")
    if not compiler or shutil.which(compiler[0]) is None:
        log.warning("no C compiler (CC, or gcc): weights in blocks are widened, which is slower")
        return None
    try:
        program = _loaded([*compiler, *flags])
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning("weights in blocks are widened, which is slower: %s", said)
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    program.block_product.argtypes = [
        *(pointer, count, pointer, pointer, pointer, count, count),
        *(ctypes.c_int, pointer, ctypes.c_int),
    ]
    return program


def _loaded(compiler: list[str]) -> ctypes.CDLL:
    """Load the library, which is compiled once for each kind of processor."""
    source = files(__package__) / "blocks.c"
    said = [source.read_text(), *compiler, _processor()]
    name = hashlib.sha256("\0".join(said).encode()).hexdigest()[:16]
    library = cache_folder("kernels") / f"blocks-{name}.so"
    try:
        if _is_own(library):
            return ctypes.CDLL(str(library))
    except OSError:
        log.warning("%s cannot be loaded, and is compiled again", library)
    with ExitStack() as work:
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            folder = work.enter_context(tempfile.TemporaryDirectory(dir=library.parent))
        except OSError:  # then every process compiles its own
            folder = work.enter_context(tempfile.TemporaryDirectory())
        made = Path(folder) / "blocks.so"
        command = [*compiler, "-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp", str(source)]
        subprocess.run(
            [*command, "-o", str(made), "-lm"],
            check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS,
        )  # fmt: skip
        program = ctypes.CDLL(str(made))
        with suppress(OSError):
            made.replace(library)
        return program


def _is_own(library: Path) -> bool:
    """Whether the file is there, and nobody else may have written it."""
    try:
        found = library.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _processor() -> str:
    """Return what identifies the processor: a home folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())
