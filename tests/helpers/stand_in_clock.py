"""A clock for a process that times stand-ins: they alone move it, whatever the machine's load.

Only `time.perf_counter` follows it, by which work is timed; limits are on the monotonic clock.
"""

import time

import torch

from diffray.components.mesh import Mesh

_seconds = 0.0


def use() -> None:
    time.perf_counter = now


def now() -> float:
    return _seconds


def pass_time(seconds: float) -> None:
    global _seconds
    _seconds += seconds


def turn_back(to: float) -> None:
    global _seconds
    _seconds = to


def meet(mesh: Mesh) -> None:
    """Wait for the rank whose clock is the furthest, as in a collective; all ranks must call it."""
    global _seconds
    _seconds = float(mesh.all_gather(torch.tensor([_seconds], dtype=torch.float64)).max())
