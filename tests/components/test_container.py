"""How much of a machine a process may use, by the files of its control groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffray.components.container import available_memory, usable_cores

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def machine(folder: Path, groups: str, files: dict[str, object]) -> Path:
    """Write the files of a machine below `folder`."""
    everything = {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups} | files
    for name, text in everything.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder


def test_without_limits_the_machine_is_the_limit(tmp_path: Path) -> None:
    system = machine(
        tmp_path, "0::/", {"sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": "max"}
    )
    assert usable_cores(system) == 16
    assert available_memory(system) == 32 * GIB


def test_version_2_counts_the_tightest_of_nested_groups(tmp_path: Path) -> None:
    pod = "sys/fs/cgroup/pod"
    files: dict[str, object] = {
        "sys/fs/cgroup/cpu.max": "1200000 100000",
        f"{pod}/cpu.max": "350000 100000",
        f"{pod}/inner/cpu.max": "max 100000",
        f"{pod}/memory.max": 10 * GIB,
        f"{pod}/memory.current": 7 * GIB,
        f"{pod}/memory.stat": f"anon 5\ninactive_file {2 * GIB}",
    }
    system = machine(tmp_path, "0::/pod/inner", files)
    assert usable_cores(system) == 3
    assert available_memory(system) == 5 * GIB


def test_version_1_seen_from_inside_a_container(tmp_path: Path) -> None:
    """The group's path is the host's; its files stand at the root."""
    files: dict[str, object] = {
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": 50000,
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 4 * GIB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 5 * GIB,
    }
    system = machine(tmp_path, "4:memory:/docker/1\n3:cpuacct,cpu:/docker/1", files)
    assert usable_cores(system) == 1
    assert available_memory(system) == 0


def page_faults(prepare: str) -> int:
    """Return how many pages the system makes anew while tensors of 32 MB come and go ten times."""
    script = f"""
import resource, torch
from diffray.components.backend import keep_freed_memory
{prepare}
def use():
    parts = [torch.ones(1 << 20) for _ in range(8)]
    del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before = use()
for _ in range(10):
    after = use()
print(after - before)
"""
    # Else glibc would learn a threshold of its own from the first tensors that it gives back.
    few = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=few, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.long
def test_freed_memory_is_used_again() -> None:
    assert page_faults("keep_freed_memory()") < page_faults("") / 4


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
