"""What this machine can do: the device and the dtype that "auto" stands for, memory, threads."""

from typing import Final

import torch

from diffray.components.container import available_memory, usable_cores

DTYPES: Final = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_device(name: str) -> torch.device:
    """Return the device; "auto" is CUDA where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}; expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch sees no CUDA device here; use cpu")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype; "auto" is bfloat16 where the device is fast at it, else float32."""
    if name == "auto":
        return torch.bfloat16 if is_fast_at_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def is_fast_at_bfloat16(device: torch.device) -> bool:
    """Return whether generation is faster in bfloat16 than in float32.

    On a CPU with AVX-512 alone it was not: the demo LLaDA-MoE took 2.1 times as long as in float32,
    though large matmuls gained. AMX has not been tried.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def free_memory(device: torch.device) -> int:
    """Return how many bytes the device could still give."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def threads_per_rank(ranks_here: int) -> int:
    """Return how many threads torch should use in each of a machine's ranks on the CPU."""
    return max(usable_cores() // ranks_here, 1)
