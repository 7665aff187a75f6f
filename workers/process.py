"""Which process this is, so that another one of its node can end it and no other."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

Place = dict[str, Any]  # node, pid and start of a process, and what else its maker adds


def own_place(node: str) -> Place:
    """Return where this process runs, on the node that it says it is on."""
    return {"node": node, "pid": os.getpid(), "started": started(os.getpid())}


def started(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; another one with its id has another."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def kill(place: Place, node: str) -> None:
    """Kill a process of this node, unless its id belongs to another one by now."""
    if place["node"] == node and started(place["pid"]) == place["started"]:
        with suppress(ProcessLookupError):
            os.kill(place["pid"], signal.SIGKILL)
