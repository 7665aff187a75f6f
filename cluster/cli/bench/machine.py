"""On what a benchmark ran: without it its numbers mean little."""

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import diffray

if TYPE_CHECKING:
    from diffray.cluster.control.llm import DiffusionLLM


def when_and_where() -> dict[str, str]:
    """Return the date, the machine, and the command line without the program's own place."""
    load = f"{os.getloadavg()[0]:.1f}"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["diffray", *sys.argv[1:]]),
        "diffray": diffray.__version__,
        "machine": f"{_processor()}, {os.cpu_count()} cores, load {load} at the start",
    }


def engine_facts(llm: "DiffusionLLM", model: str) -> dict[str, str]:
    """Return what the engine runs with."""
    import torch

    device = llm.engine.slots.device
    shared = llm.engine.kv.prefixes.enabled and llm.engine.model.spec.block_causal
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "model": model,
        "device": f"{kind}, {torch.get_num_threads()} threads",
        "dtype": str(llm.engine.kv.keys_LSGD.dtype).removeprefix("torch."),
        "prefix caching": "on" if shared else "off",
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
