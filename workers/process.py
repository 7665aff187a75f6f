"""Identifies a process, so that another process on its node can kill it and no other."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process and its Ray node; its start time tells reused ids apart."""

    node: str
    pid: int
    started: int | None


def own_process(node: str) -> Process:
    """Return this process, on the given node."""
    return Process(node, os.getpid(), started(os.getpid()))


def started(pid: int) -> int | None:
    """Return a process's start time in ticks since boot."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def kill(process: Process, node: str) -> None:
    """Kill a process on this node, unless its id has been reused."""
    if process.node == node and started(process.pid) == process.started:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
