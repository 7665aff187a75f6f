"""How GPU programs here are timed and reported: events, warm-up, medians, a cold cache, JSON."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PAGE_SIZE = 32
_FLUSH_BYTES = 256 << 20  # several times the largest L2 cache


def arguments(what: str) -> argparse.ArgumentParser:
    """Return a parser with what every script here takes."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path, help="write the JSON report here, not to the screen")
    return parser


def need_cuda() -> torch.device:
    """Return the CUDA device, or end the program with one sentence and exit status 2."""
    if not torch.cuda.is_available():
        print(
            "This needs a GPU, and torch sees no CUDA device here; run it on a machine with one.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return torch.device("cuda", torch.cuda.current_device())


def facts() -> dict[str, Any]:
    """Return what a number means nothing without: when, where, with what."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        versions["triton"] = None
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        **versions,
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            asked = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
            found["driver"] = asked.stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            found["driver"] = "unknown: nvidia-smi did not answer"
        found["gpu"] = device.name
        found["multiprocessors"] = device.multi_processor_count
        found["memory_gib"] = round(device.total_memory / 2**30, 1)
    return found


def write_report(report: dict[str, Any], out: Path | None) -> None:
    """Write the report where it was asked for."""
    text = json.dumps(report, indent=1)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n")
        print(f"report: {out}")


class Clock:
    """Times work on the device, each run from a cold cache."""

    def __init__(self, device: torch.device, runs: int = 30) -> None:
        self.runs = runs
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def seconds(self, run: Callable[[], object], *, cold: bool = True) -> float:
        """Return the median time of a run."""
        for _ in range(3):
            run()
        pairs = []
        for number in range(self.runs):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if cold:
                # It also keeps the device busy while the host enqueues what is timed.
                self._flush.fill_(number)
            start.record()
            run()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return statistics.median(float(a.elapsed_time(b)) for a, b in pairs) / 1e3

    def ceilings(self) -> dict[str, float]:
        """Measure what the device can do: bytes and bfloat16 operations per second."""
        device = self._flush.device
        source = torch.empty(1 << 30, dtype=torch.int32, device=device).fill_(7)
        target = torch.empty_like(source)
        copy_s = self.seconds(lambda: target.copy_(source))
        moved = 2 * source.numel() * 4
        a, b = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16)
        product_s = self.seconds(lambda: a @ b, cold=False)
        return {"bytes_per_s": moved / copy_s, "flops_per_s": 2 * 8192**3 / product_s}


def graphed(run: Callable[[], object]) -> Callable[[], None]:
    """Capture what `run` does on the device; the result does it again without the host."""
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
