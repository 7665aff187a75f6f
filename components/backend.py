"""What this machine supports: the meaning of "auto", memory, threads, CUDA graphs."""

import ctypes
import math
import mmap
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from diffray.components.container import available_memory, usable_cores
from diffray.components.dtypes import DTYPE_NAMES
from diffray.components.quantization import Given, Scheme, parse_quantization

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in DTYPE_NAMES}

_WEIGHTS_PER_THREAD = 8_000_000
_OVERHEAD_OF_GPU = 256  # positions; not measured
_OVERHEAD_OF_CALLS = 900_000_000  # positions times weights
_OVERHEAD_IN_BLOCKS = 1_800_000_000
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of malloc.h
_KEPT = 64 << 20  # bytes kept at the end of the heap
_CACHED = 1 << 18  # numbers that a core's cache holds


def choose_device(name: str) -> torch.device:
    """Return the device; "auto" is CUDA if available, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}; expected auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch sees no CUDA device here; use cpu")
    return device


def make_current(device: torch.device) -> None:
    """Launch kernels and record graphs on this device, if there are several."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype; "auto" is bfloat16 if the device is fast at it, else float32."""
    if name == "auto":
        return torch.bfloat16 if is_fast_at_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_quantization(given: Given | None, device: torch.device) -> Scheme | None:
    """Return which weights are kept in which format, or None for all in the model's dtype."""
    if given is None:
        return None
    scheme = parse_quantization(given)
    check_formats(scheme, device)
    return scheme


def check_formats(scheme: Scheme, device: torch.device) -> None:
    """Refuse formats that the device cannot read."""
    if device.type == "cuda":
        check_capability(scheme, torch.cuda.get_device_capability(device))


def check_capability(scheme: Scheme, capability: tuple[int, int]) -> None:
    """Refuse formats that a GPU of this compute capability cannot read."""
    if scheme.kinds & {"fp8", "w8a8_fp8"} and capability < (8, 9):
        found = ".".join(map(str, capability))
        raise ValueError(
            f"quantization is {scheme.given}, but float8 needs a GPU of compute capability "
            f"8.9, and this one has {found}; use int8 or w8a8"
        )


def is_fast_at_bfloat16(device: torch.device) -> bool:
    """Return whether generation is faster in bfloat16 than in float32.

    On a CPU with only AVX-512 it was slower: an earlier demo LLaDA-MoE took 2.1 times as long as in
    float32, although large matmuls gained. AMX is untested.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def gpu_facts(device: torch.device) -> dict[str, str]:
    """Return the device's model, compute capability and driver; only the architecture of a CPU."""
    if device.type != "cuda":
        return {"gpu": platform.machine(), "capability": "", "driver": ""}
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "driver": driver_version() or "unknown",
    }


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None if no driver answers."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    version = ctypes.create_string_buffer(80)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(version, len(version)):
        return None
    library.nvmlShutdown()
    return version.value.decode()


def free_memory(device: torch.device) -> int:
    """Return how many bytes the device can still allocate."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU, memory is committed on first write.

    `torch.zeros` writes all of it: gigabytes, and a second, for slots that may never be used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in host memory, pinned for CUDA so that copies overlap with computation."""
    if device.type != "cuda":
        return zeros(shape, dtype, device)
    return torch.zeros(shape, dtype=dtype, pin_memory=True)


class SideStream:
    """A stream for copies that overlap a device's forwards; on a CPU they run in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_forwards(self, used: Tensor) -> Iterator[None]:
        """Run the block's copies, which use this tensor, after all work launched before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        used.record_stream(self._stream)  # so its memory is not reused before the copies end

    def before_forwards(self) -> None:
        """Make work launched from now on wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to the device without waiting for the device.

    A copy to CUDA from unpinned memory waits until all earlier work is done.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


Record = Callable[[Callable[[], Any]], Callable[[], Any]]


def choose_recorder(cuda_graphs: bool | None, device: torch.device, kernels: str) -> Record | None:
    """Return a recorder of a function's device work for replay, or None for no recording.

    The default is to record on CUDA with Triton's kernels. Torch's kernels may wait for the host,
    which cannot be recorded.
    """
    return cuda_recorder() if records(cuda_graphs, device, kernels) else None


def records(cuda_graphs: bool | None, device: torch.device, kernels: str) -> bool:
    """Return whether CUDA graphs are recorded; refuse them where they cannot be."""
    if cuda_graphs is None:
        cuda_graphs = device.type == "cuda" and kernels == "triton"
    if cuda_graphs and device.type != "cuda":
        raise ValueError(f"cuda_graphs needs a CUDA device, and this is {device}; leave it out")
    if cuda_graphs and kernels != "triton":
        raise ValueError(f"cuda_graphs needs kernels 'triton', and these are {kernels!r}")
    return cuda_graphs


def cuda_recorder() -> Record:
    """Return a recorder of CUDA graphs that share one memory pool; record large graphs first.

    A recorded function's results stay in place: the next replay overwrites them.
    """
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream()  # shared by all graphs, because libraries keep memory per stream
    # Kept, because PyTorch refuses to record into a pool whose graphs are all gone.
    first = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, pool=pool):
        torch.zeros(1, device="cuda")

    def record(run: Callable[[], Any]) -> Callable[[], Any]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # warm up: compile kernels, initialize libraries
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=first.pool()):
            out = run()

        def replay() -> Any:
            graph.replay()
            return out

        return replay

    return record


def peak_memory(device: torch.device, run: Callable[[], object]) -> int:
    """Return how far a run's peak memory exceeds the memory in use before; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def use_threads(count: int | None = None) -> None:
    """Set torch's number of threads, capped at the usable cores.

    In a container, torch counts all cores of the machine.
    """
    torch.set_num_threads(min(count or torch.get_num_threads(), usable_cores()))


def threads_for(weights: int) -> int:
    """Return how many threads compute a model with this many weights on a CPU, if they are free.

    With more threads, each operation is so short that they wait for each other longer than they
    work, and much longer if other processes use the cores.
    """
    return max(weights // _WEIGHTS_PER_THREAD, 1)


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Compute with this many threads, or with as many as before."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)  # takes half a microsecond
        yield
    finally:
        torch.set_num_threads(before)


def overhead_positions(device: torch.device, weights: int, *, in_blocks: bool) -> int:
    """Return a forward's fixed time, as the number of positions it could run in that time.

    A GPU reads its weights in that time. A CPU multiplies about as fast as it reads, so the fixed
    time is that of the calls. On two cores with 100 M weights, 8 blocks of 4 positions took 4 times
    as long as one. With the 3.6 M of the demo models any number from 140 to 280 takes the same
    time, so it is near the upper end, which saves the most forwards. Positions cost half as much
    with matrices in blocks of 4 bits, of which 134 M take 13 ms for a position, and 1 ms more for
    each other one.
    """
    if device.type == "cuda":
        return _OVERHEAD_OF_GPU
    return 1 + (_OVERHEAD_IN_BLOCKS if in_blocks else _OVERHEAD_OF_CALLS) // max(weights, 1)


def rows_at_a_time(values_RV: Tensor, width: int | None = None) -> int:
    """Return how many rows to process together: all, or on a CPU as many as its cache holds.

    Rows are as long as `values_RV`'s, or `width`.
    """
    rows = max(len(values_RV), 1)
    if values_RV.device.type != "cpu":
        return rows
    return min(rows, max(_CACHED // (width or values_RV.shape[1]), 1))


def keep_freed_memory() -> None:
    """Make the C library keep some freed memory for the next allocations.

    By default glibc returns a step's memory to the system, which must map all its pages again in
    the next step. That takes a third of the time of a forward of a thousand tokens. Other C
    libraries are left unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 256 << 20)
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the largest value it accepts


def finish(device: torch.device) -> None:
    """Wait for all work launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back_memory(kept: int = _KEPT) -> None:
    """Return freed memory to the system, except for `kept` bytes; call it when idle.

    Otherwise the C library keeps the memory of the largest round, up to a gigabyte of fragments.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(kept)


def give_back_all(device: torch.device) -> None:
    """Return all freed memory of the host and the device to the system."""
    give_back_memory(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.accelerator.empty_host_cache()  # of pinned memory
