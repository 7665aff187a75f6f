"""How much of a machine a process may use, by the files of its control groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffray.components.container import available_memory, usable_cores

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"
# What a process is told of its groups, their files, and the cores and memory that it may use.
MACHINES: dict[str, tuple[str, dict[str, object], int, int]] = {
    "no limits": ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, 16, 32 * GIB),
    "the tightest of nested groups": (
        "0::/pod/inner",
        {
            "cpu.max": "1200000 100000",
            "pod/cpu.max": "350000 100000",
            "pod/inner/cpu.max": "max 100000",
            "pod/memory.max": 10 * GIB,
            "pod/memory.current": 7 * GIB,
            "pod/memory.stat": f"anon 5\ninactive_file {2 * GIB}",
        },
        3,
        5 * GIB,
    ),
    # The group's path is the host's; its files stand at the root.
    "version 1 inside a container": (
        "4:memory:/docker/1\n3:cpuacct,cpu:/docker/1",
        {
            "cpu/cpu.cfs_quota_us": 50000,
            "cpu/cpu.cfs_period_us": 100000,
            "memory/memory.limit_in_bytes": 4 * GIB,
            "memory/memory.usage_in_bytes": 5 * GIB,
        },
        1,
        0,
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_control_groups_limit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    groups, files, cores, memory = MACHINES[name]
    limits = {f"sys/fs/cgroup/{file}": text for file, text in files.items()}
    for file, text in ({"proc/meminfo": MEMINFO, "proc/self/cgroup": groups} | limits).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"{text}\n")
    assert (usable_cores(tmp_path), available_memory(tmp_path)) == (cores, memory)


def test_an_idle_rank_gives_freed_memory_back() -> None:
    """Also what lies between pieces that are still in use, which the C library keeps by itself."""
    code = """
import re, torch
from diffray.components.backend import give_back_memory, keep_freed_memory

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

keep_freed_memory()
begin = resident()
pieces = [torch.ones(1 << 18) for _ in range(400)]  # a MiB each
del pieces[:-1]
kept = resident()
give_back_memory()
print(begin, kept, resident())
"""
    run = [sys.executable, "-c", code]
    told = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    begin, kept, left = map(int, told.split())
    assert kept > begin + 300
    assert left < begin + 100
