"""What `diffray doctor` checks on this machine, and how to fix what is wrong."""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from diffray.cluster.cli.checkpoint_commands import in_units
from diffray.cluster.control.engine_config import EngineConfig
from diffray.components.backend import choose_device, choose_dtype, driver_version
from diffray.components.checkpoints.folder import read_config, resolve
from diffray.components.checkpoints.info import describe
from diffray.components.container import available_memory, usable_cores
from diffray.components.models.registry import runs_on_torch_alone
from diffray.kernels.choose import CPU, choose_kernels, obstacle
from diffray.kernels.cpu.program import program

_LEAST_SHARED = 2**30  # bytes of shared memory: containers have 64 MiB by default
# Those most useful to torch come first.
_FEATURES = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512_f", "avx2", "sve2", "sve")


@dataclass(frozen=True, slots=True)
class Check:
    """What was found, and how to fix it."""

    name: str
    found: str
    fix: str = ""  # a sentence without its full stop; empty if all is well


def machine_checks(model: str, config: EngineConfig) -> Iterator[Check]:
    """Yield a check of each thing that serving the model depends on."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    # Fails on a wrong path, before any check.
    needed = describe(model, config.quantization).bytes_in_memory
    yield cpu()
    yield gpu(config.tensor_parallel_size)
    yield kernels(model, config.kernels, device, dtype)
    if torch.cuda.is_available():
        yield compiler()
    weights = needed[str(dtype).removeprefix("torch.")]
    yield memory(weights, device, config.tensor_parallel_size)
    yield shared_memory()


def cpu() -> Check:
    known = torch.cpu.get_capabilities()
    features = [name for name in _FEATURES if known.get(name)]
    vectors = ", ".join(features) or "no vector unit that torch uses"
    dtype = str(choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    why = ""
    if "avx512_bf16" in features and dtype == "float32":
        why = ", because without AMX bfloat16 was half as fast, despite avx512_bf16"
    return Check("CPU", f"{usable_cores()} cores, {vectors}; dtype auto is {dtype}{why}")


def gpu(ranks: int = 1) -> Check:
    driver = driver_version()
    if torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        names = ", ".join(f"{each.name} ({in_units(each.total_memory)})" for each in gpus)
        found = f"{names}; driver {driver or 'unknown'}, CUDA {torch.version.cuda}"
        if ranks > (count := torch.cuda.device_count()):
            fix = (
                f"--tp {ranks} needs {ranks} GPUs, and this machine has {count}; choose --tp "
                f"{count}, or join machines with more to its Ray cluster"
            )
            return Check("GPU", found, fix)
        return Check("GPU", found)
    if driver is None:
        return Check("GPU", "none (no NVIDIA driver)")
    if torch.version.cuda is None:
        fix = "torch is built for CPUs only; install a CUDA build of it (https://pytorch.org)"
    else:
        fix = (
            "torch sees no GPU; unset CUDA_VISIBLE_DEVICES, or install a driver for CUDA "
            f"{torch.version.cuda}"
        )
    return Check("GPU", f"unused, although NVIDIA's driver {driver} is installed", fix)


def kernels(model: str, requested: str, device: torch.device, dtype: torch.dtype) -> Check:
    """Report whose kernels run; `doctor` checks Triton's afterwards."""
    if device.type == "cpu" and requested != "triton":
        in_c = choose_kernels(requested, device, dtype) is CPU
        return programs() if in_c else Check("kernels", "torch's")
    if requested == "torch" or runs_on_torch_alone(read_config(resolve(model))):
        return Check("kernels", "torch's")
    if (why_not := obstacle(device, dtype)) is not None:
        fix = f"Triton's kernels cannot be used ({why_not}); --kernels torch skips them"
        return Check("kernels", "torch's only", fix)
    return Check("kernels", "Triton's")


def programs() -> Check:
    """Compile the programs in C that replace torch's functions on a CPU."""
    vectors = torch.backends.cpu.get_cpu_capability()
    if program() is not None:
        return Check("kernels", f"in C for {vectors}, else torch's")
    if vectors.startswith("AVX") and platform.machine() == "x86_64":
        return Check("kernels", "torch's, which are slower: no C compiler works (CC, or gcc)")
    return Check("kernels", "torch's")


def compiler() -> Check:
    """Find the C compiler, with which Triton compiles the launchers of its kernels."""
    names = (os.environ.get("CC"), "gcc", "clang", "cc")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        return Check("compiler", "none", "Triton's kernels need a C compiler; install gcc")
    return Check("compiler", found)


def memory(needed: int, device: torch.device, ranks: int) -> Check:
    """Compare the weights with the memory of a GPU, or of this machine, which holds all ranks."""
    if device.type == "cuda":
        free, needed = torch.cuda.mem_get_info(device)[0], needed // ranks
    else:
        free = available_memory()
    whose = "a rank's" if device.type == "cuda" and ranks > 1 else "the"
    found = f"{in_units(free)} free; {whose} weights take {in_units(needed)}"
    if needed < free:
        return Check("memory", found)
    fix = "the model does not fit; choose a smaller dtype, more ranks (--tp), or free memory"
    return Check("memory", found, fix)


def shared_memory(place: Path = Path("/dev/shm")) -> Check:
    """Check the space for Ray's objects and NCCL's buffers."""
    free = shutil.disk_usage(place).free if place.is_dir() else 0
    found = f"{in_units(free)} free in {place}"
    if free >= _LEAST_SHARED:
        return Check("shared memory", found)
    fix = f"Ray and NCCL need 1 GiB in {place}; start the container with --shm-size=2g"
    return Check("shared memory", found, fix)
