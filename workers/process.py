"""Processes of this machine: which one is meant, which are this one's children, and which run."""

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


def children() -> set[int]:
    """Return this process's children, including zombies."""
    found, parent = set(), os.getpid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    found.add(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def kill(process: Process, node: str) -> None:
    """Kill a process on this node, unless its id has been reused."""
    if process.node == node and started(process.pid) == process.started:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
