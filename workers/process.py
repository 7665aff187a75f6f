"""Identifies a process, so that another one on its node can end it and no other."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

Place = dict[str, Any]  # node, pid and start time of a process, and what its caller adds


def own_place(node: str) -> Place:
    """Return the place of this process, on the given node."""
    return {"node": node, "pid": os.getpid(), "started": started(os.getpid())}


def started(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; it tells reused ids apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def kill(place: Place, node: str) -> None:
    """Kill a process on this node, unless its id has been reused."""
    if place["node"] == node and started(place["pid"]) == place["started"]:
        with suppress(ProcessLookupError):
            os.kill(place["pid"], signal.SIGKILL)
