"""How the GPU programs measure: events, warm-up, medians, a cold cache, and what they ran on."""

import hashlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

import diffray
from diffray.components.roofline import Ceilings

ROOT: Final = Path(__file__).parents[2]
_FLUSH_BYTES = 256 << 20  # several times the largest L2 cache


def source_facts() -> dict[str, Any]:
    """Return the date, the command, and the version of the code."""
    folders = (ROOT / name for name in ("kernels", "components", "workers", "benchmarks/gpu"))
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "changed_files": None if changed is None else len(changed.splitlines()),
        "sources": sources.hexdigest()[:12],  # identifies the code without git
        "diffray": diffray.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def device_facts() -> dict[str, Any]:
    """Return the version of Triton, the GPU, its driver, and the clocks that this allows."""
    found: dict[str, Any] = {"triton": None}
    with suppress(ImportError):
        import triton

        found["triton"] = triton.__version__
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        query = "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit"
        found["gpu"] = device.name
        found["driver"] = _output("nvidia-smi", query, "--format=csv,noheader")
        found["multiprocessors"] = device.multi_processor_count
        found["memory_gib"] = round(device.total_memory / 2**30, 1)
    return found


def _output(*command: str) -> str | None:
    """Return what a command prints; None if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=20
        ).strip()
    return None


@cache
def _cold() -> torch.Tensor:
    return torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")


def median_s(run: Callable[[], object], runs: int, *, cold: bool = True) -> float:
    """Return the median time of a run on the device, each from a cold cache, after a warm-up."""
    for _ in range(3):
        run()
    pairs = []
    for number in range(runs):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if cold:
            # It also keeps the device busy while the host enqueues what is timed.
            _cold().fill_(number)
        start.record()
        run()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(float(a.elapsed_time(b)) for a, b in pairs) / 1e3


@cache
def ceilings() -> Ceilings:
    """Measure what the device can do: bytes and bfloat16 operations per second."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").fill_(7)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), 30)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product_s = median_s(lambda: a @ b, 30, cold=False)
    return Ceilings(2 * source.nbytes / copy_s, 2 * 8192**3 / product_s)


def graphed(run: Callable[[], object]) -> Callable[[], None]:
    """Capture what `run` does on the device in a graph; return the graph's replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def kernel_table(run: Callable[[], object], device: str = "cuda") -> dict[str, Any]:
    """Return every kernel of a run by torch.profiler: calls and microseconds, the longest first.

    `span_us` is from the first kernel's start to the last one's end, gaps included.
    """
    kind = {"cuda": ProfilerActivity.CUDA, "cpu": ProfilerActivity.CPU}[device]
    profiles = []
    for _ in range(2):  # the first may miss kernels, and CUDA 13.0 may record none in the second
        with profile(activities=[kind]) as seen:
            run()
            if device == "cuda":
                torch.cuda.synchronize()
        profiles.append([e for e in seen.events() or () if e.device_type.name.lower() == device])
    events = max(reversed(profiles), key=len)
    table: dict[str, list[float]] = {}
    for event in events:
        table.setdefault(event.name, []).append(event.time_range.elapsed_us())
    if not events:
        raise RuntimeError("torch.profiler saw no kernels; may this user read CUPTI's activities?")
    start = min(event.time_range.start for event in events)
    rows = [{"kernel": k, "calls": len(us), "us": round(sum(us), 2)} for k, us in table.items()]
    return {
        "busy_us": sum(row["us"] for row in rows),
        "span_us": max(event.time_range.end for event in events) - start,
        "kernels": sorted(rows, key=lambda row: -row["us"]),
    }
