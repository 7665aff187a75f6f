"""The programs in C of this folder, compiled for the processor when they are first needed."""

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

from diffray.kernels.user_cache import cache_folder

log = logging.getLogger(__name__)

_SOURCES: Final = "blocks.c", "rows.c"
_FLAGS: Final = {"AVX2": ("-mavx2", "-mfma", "-mf16c"), "AVX512": ("-march=native",)}
_COMPILE_SECONDS: Final = 60
_TYPES: Final = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
}
_ARGUMENTS: Final = {
    "block_product": "pnpppnnipi",
    "rms_norm": "pppfppnni",
    "rotate_and_store": "ppfpppppnnnnni",
    "attend_windows": "pnpppppppnnpnnnnfpi",
    "extremes": "pnnnppi",
    "add_low_rank": "ppnnpnpn",
}


@cache
def program() -> ctypes.CDLL | None:
    """Return the compiled program; None where there is no compiler, or no AVX2."""
    flags = _FLAGS.get(torch.backends.cpu.get_cpu_capability())
    if flags is None or platform.machine() != "x86_64":
        return None
    compiler = shlex.split(os.environ.get("CC") or "gcc")
    if not compiler or shutil.which(compiler[0]) is None:
        log.warning("no C compiler (CC, or gcc): torch's functions run instead, which are slower")
        return None
    try:
        library = _loaded([*compiler, *flags])
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning("torch's functions run instead, which are slower: %s", said)
        return None
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = [_TYPES[letter] for letter in arguments]
    return library


def _loaded(compiler: list[str]) -> ctypes.CDLL:
    """Load the library, which is compiled once for each kind of processor."""
    sources = [files(__package__) / name for name in _SOURCES]
    said = [*(source.read_text() for source in sources), *compiler, _processor()]
    name = hashlib.sha256("\0".join(said).encode()).hexdigest()[:16]
    library = cache_folder("kernels") / f"cpu-{name}.so"
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
        made = Path(folder) / "cpu.so"
        command = [*compiler, "-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp"]
        subprocess.run(
            [*command, *map(str, sources), "-o", str(made), "-lm"],
            check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS,
        )  # fmt: skip
        loaded = ctypes.CDLL(str(made))
        with suppress(OSError):
            made.replace(library)
        return loaded


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
