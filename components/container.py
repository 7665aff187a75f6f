"""The cores and memory that this process may use, within the limits of its control groups.

`system` is the root of the machine's files; only tests pass anything but "/".
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cores(system: Path = _ROOT) -> int:
    """Return how many cores this process may keep busy, at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for group in _groups("cpu", system):
        words = _words(group / "cpu.max")  # "200000 100000" or "max 100000"
        words = words or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(words) == 2 and words[0] not in ("max", "-1"):
            cores = min(cores, int(words[0]) / int(words[1]))
    return max(int(cores), 1)


def available_memory(system: Path = _ROOT) -> int:
    """Return how many bytes this process can take without exhausting the machine."""
    free = int(_table(system / "proc/meminfo")["MemAvailable:"]) * 1024
    for group in _groups("memory", system):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        if limit and used and limit != ["max"]:
            # Unused file pages are reclaimed before anything fails.
            spare = _table(group / "memory.stat").get("inactive_file", "0")
            free = min(free, int(limit[0]) - int(used[0]) + int(spare))
    return max(free, 0)


def _groups(controller: str, system: Path) -> Iterator[Path]:
    """Yield the folders of the groups that may limit this process, in cgroup version 1 and 2."""
    mounts = system / "sys/fs/cgroup"
    for line in _lines(system / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = mounts / controller if controllers else mounts
        group = mount / path.lstrip("/")  # in a container it may exist only outside
        yield group
        while group != mount:
            group = group.parent
            yield group


def _table(path: Path) -> dict[str, str]:
    return {words[0]: words[1] for line in _lines(path) if len(words := line.split()) > 1}


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    """Return the file's lines; none if it does not exist, which means there is no limit."""
    return path.read_text().splitlines() if path.is_file() else []


def nvidia_gpus() -> int:
    """Return the number of this machine's GPUs, as NVIDIA's driver counts them."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    library.nvmlShutdown()
    return count.value
