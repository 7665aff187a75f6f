"""The server under test: `diffray serve` with some replicas, its processes and what they hold."""

import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.chaos.faults import Fault
from tools.serve_process import ServeProcess, serve_process

# Ray's log monitor keeps the logs of the dead open, up to 200.
KEEPS_LOGS = "log_monitor.py"
PARTS = {"rank": "ray::Worker", "coordinator": "ray::Coordinator", "replica": ":Replica"}
SERVE = {"proxy": "ray::ProxyActor", "controller": "ray::ServeController", "batches": ":Batches"}
NAMES = PARTS | SERVE
RAY = {"gcs": "/gcs/gcs_server ", "raylet": "/raylet/raylet "}
SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Layout:
    """How much is served."""

    model: str = "demo"
    replicas: int = 2
    ranks: int = 1
    slots: int = 16
    queue: int = 16
    prefix_routing: bool = False

    def config(self, files: Path) -> str:
        """Return the YAML that `diffray serve --config` reads."""
        return yaml.safe_dump(
            {
                "model_loading_config": {"model_id": self.model},
                "engine_kwargs": {
                    "dtype": "float64",
                    "device": "cpu",
                    "cpu_threads": 1,
                    "tensor_parallel_size": self.ranks,
                    "max_num_seqs": self.slots,
                    "max_queued_requests": self.queue,
                    "check_every": 16,
                    "max_restarts": 1000,
                },
                "deployment_config": {
                    "num_replicas": self.replicas,
                    "health_check_period_s": 1,
                    "graceful_shutdown_timeout_s": 60,
                    "prefix_routing": self.prefix_routing,
                },
                "placement_group_config": {"strategy": "PACK"},
                "api": {"files": str(files)},
            }
        )


class System:
    """A running server; hits its processes."""

    def __init__(self, served: ServeProcess, model: str) -> None:
        self.served, self.model = served, model
        self.stopped: set[int] = set()  # processes that hang until they are killed
        self._fds = self.descriptors()
        self._kinds = self.kinds()

    def pids(self, part: str) -> list[int]:
        """Return the processes of a part, the oldest first."""
        return sorted(pid for pid, line in self.served.processes().items() if _is(part, line))

    def hit(self, fault: Fault, number: signal.Signals) -> int | None:
        """Send a signal to one of those that the fault may hit; None where there is none now."""
        found = [pid for pid in self.pids(fault.kind.split()[-1]) if pid not in self.stopped]
        if not found:
            return None
        pid = found[int(fault.pick * len(found))]
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    def wake_all(self) -> None:
        """Let nothing hang for ever, whatever became of it."""
        for pid in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kinds(self) -> Counter[str]:
        """Return how many processes there are of each kind that lasts."""
        lines = self.served.processes().values()
        return Counter(part for line in lines for part in NAMES if _is(part, line))

    def descriptors(self) -> dict[int, tuple[str, int]]:
        """Return the open files of the processes that no fault hits: name and number."""
        found = {}
        for pid, line in self.served.processes().items():
            hit = any(_is(part, line) for part in NAMES)
            if not hit and not line.startswith("ray::IDLE") and KEEPS_LOGS not in line:
                with suppress(OSError):
                    found[pid] = line[:120], len(os.listdir(f"/proc/{pid}/fd"))
        return found

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of each part, all its processes together."""
        found: Counter[str] = Counter()
        for part in (*NAMES, *RAY):
            for pid in self.pids(part):
                with suppress(OSError, IndexError):
                    text = Path(f"/proc/{pid}/statm").read_text()
                    found[part] += int(text.split()[1]) * os.sysconf("SC_PAGESIZE")
        return dict(found)

    def leaks(self) -> list[str]:
        """Return what is held now and was not at the beginning, while the server runs."""
        kinds, now = self.kinds(), self.descriptors()
        found = [
            f"{kinds[part]} processes of the {part} instead of {self._kinds[part]}"
            for part in NAMES
            if kinds[part] != self._kinds[part]
        ]
        for pid, (name, count) in self._fds.items():
            if pid in now and now[pid][1] > 1.5 * count + 32:
                found.append(f"{name} ({pid}): {now[pid][1]} open files instead of {count}")
        return found


@contextmanager
def running(layout: Layout, folder: Path) -> Iterator[System]:
    """Start the server and wait until all replicas are there."""
    config = folder / "chaos.yaml"
    config.write_text(layout.config(folder / "files"))
    with serve_process("--config", str(config)) as served:
        served.wait_for(" is ready at ", 1)
        system = System(served, layout.model)
        try:
            yield system
        finally:
            system.wake_all()


def leftovers(served: ServeProcess, shared_before: set[str]) -> list[str]:
    """End the server as an operator does; return what it leaves behind."""
    served.process.send_signal(signal.SIGTERM)
    status = served.process.wait(timeout=180)
    found = [f"exit status {status}"] if status else []
    found += [f"process {pid}: {line}" for pid, line in served.processes().items()]
    found += [f"shared memory {name}" for name in sorted(shared_left(shared_before))]
    try:
        socket.create_server(("127.0.0.1", served.port)).close()
    except OSError:
        found.append(f"port {served.port}")
    return found


def _is(part: str, line: str) -> bool:
    """Whether a command line is a process of this part."""
    if part in RAY:
        return RAY[part] in f"{line} "
    name = NAMES[part]
    return name in line if name.startswith(":") else line.startswith(name)


def shared_now() -> set[str]:
    return set(os.listdir(SHARED))


def shared_left(before: set[str]) -> set[str]:
    """Return what was not there before and no living process uses: programs beside this one do.

    Python's semaphores do not count: those of a killed process beside this one stay until its
    parent ends.
    """
    new = {name for name in shared_now() - before if not name.startswith("sem.")}
    used = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended, or is another user's
            used |= set(re.findall(rf"{SHARED}/(\S+)", maps.read_text()))
    return {name for name in new - used if (SHARED / name).exists()}
