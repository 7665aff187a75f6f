"""Faults that a server need not survive: it ends soon and leaves nothing behind, or it heals.

Each happens to a server of its own with streams under way: Ray's own processes are killed, the
command itself is, its terminal is closed, or its temporary folder is full when a rank is lost.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from diffray.workers.process import started
from tools.chaos.report import LIMIT_S
from tools.chaos.system import Layout, System, running, shared_left, shared_now
from tools.chaos.workload import Client, Question, Tally, questions

KINDS = ("kill raylet", "kill gcs", "kill parent", "hang up", "fill disk")
_STREAMS = 6
_WATCHED_S = 90.0  # for a server that did not end in time to show whether it has healed
_DISK = "64m"  # of a temporary folder that becomes full


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a server."""

    kind: str
    gone: float | None  # seconds until nothing was left of it; None: it is still there
    healed: float | None  # seconds until it answered again, and went on to; None: it did not
    left: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return any(
            seconds is not None and seconds < LIMIT_S for seconds in (self.gone, self.healed)
        )

    def __str__(self) -> str:
        if self.gone is not None:
            told = f"nothing left after {self.gone:.1f} s"
        elif self.healed is not None:
            told = f"answers again after {self.healed:.1f} s"
        else:
            told = "neither ended nor healed: " + "; ".join(self.left)
        return f"{self.kind}: {told} ({'passed' if self.passed else 'FAILED'})"


@dataclass(slots=True)
class Traces:
    """What a server may leave."""

    shared: set[str]  # shared memory that was there before it
    processes: dict[int, int | None] = field(default_factory=dict)  # and when they started

    def add(self, system: System) -> None:
        """Remember what there is of it now."""
        for pid in system.served.processes():
            self.processes[pid] = started(pid)

    def left(self, system: System) -> list[str]:
        """Return what is left of it."""
        system.served.process.poll()  # else a command that was killed stays as a zombie
        self.add(system)
        found = [f"process {pid}: {line}" for pid in self._living() if (line := _line(pid))]
        found += [f"shared memory {name}" for name in sorted(shared_left(self.shared))]
        try:
            socket.create_server(("127.0.0.1", system.served.port)).close()
        except OSError:
            found.append(f"port {system.served.port}")
        return found

    def remove(self) -> None:
        """Remove what is left after all."""
        for pid in self._living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _living(self) -> list[int]:
        return [pid for pid, begin in self.processes.items() if begin == started(pid) is not None]


def terminal(layout: Layout, seed: int, say: Callable[[str], None]) -> list[Ending]:
    """Let each fault end a server of its own."""
    asked = questions(layout.model, count=2, tokens=64, seed=seed)
    found = []
    for kind in KINDS:
        if kind == "fill disk" and not _may_mount():
            say(f"{kind}: left out, for it needs root and mount")
            continue
        found.append(_end(kind, layout, asked))
        say(str(found[-1]))
    return found


def _end(kind: str, layout: Layout, asked: list[Question]) -> Ending:
    traces = Traces(shared_now())
    try:
        with (
            _disk(kind) as disk,
            tempfile.TemporaryDirectory() as config,
            running(layout, Path(config)) as system,
        ):
            try:
                return asyncio.run(_watched(kind, system, asked, disk, traces))
            finally:
                if disk is not None:
                    (disk / "full").unlink(missing_ok=True)
    finally:
        traces.remove()


async def _watched(
    kind: str, system: System, asked: list[Question], disk: Path | None, traces: Traces
) -> Ending:
    """Hit the server while it is asked, and watch what becomes of it."""
    async with httpx2.AsyncClient(base_url=system.served.url, timeout=_WATCHED_S) as http:
        found = [
            Client(number, http, system.model, asked, Tally(), lambda _: True)
            for number in range(_STREAMS)
        ]
        tasks = [asyncio.create_task(client.run(asyncio.Event())) for client in found]
        try:
            while any(client.heard == 0 for client in found):
                await asyncio.sleep(0.05)
            traces.add(system)
            begin = time.monotonic()
            _hit(kind, system, disk)
            answered: float | None = None  # since when each request has been answered
            while (now := time.monotonic() - begin) < _WATCHED_S:
                if not (left := traces.left(system)):
                    return Ending(kind, now, None)
                if not await _answers(http, asked[0]):
                    answered = None
                elif answered is None:
                    answered = time.monotonic() - begin
                await asyncio.sleep(0.5)
            return Ending(kind, None, answered, tuple(left))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _hit(kind: str, system: System, disk: Path | None) -> None:
    served = system.served
    match kind:
        case "kill raylet" | "kill gcs":
            os.kill(system.pids(kind.split()[-1])[0], signal.SIGKILL)
        case "kill parent":
            served.process.kill()
        case "hang up":
            os.killpg(served.process.pid, signal.SIGHUP)
        case _:
            assert disk is not None
            with suppress(OSError), (disk / "full").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            os.kill(system.pids("rank")[0], signal.SIGKILL)


async def _answers(http: httpx2.AsyncClient, question: Question) -> bool:
    body = question.body | {"max_tokens": 1, "stream": False}
    try:
        return (await http.post("/v1/completions", json=body, timeout=5)).status_code == 200
    except httpx2.HTTPError:
        return False


def _line(pid: int) -> str:
    """Return a process's name; a zombie has none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return Path(words[0].decode()).name


def _may_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextmanager
def _disk(kind: str) -> Iterator[Path | None]:
    """Put temporary folders on a disk that can become full, if that is the fault."""
    if kind != "fill disk":
        yield None
        return
    before = tempfile.tempdir
    disk = Path(tempfile.mkdtemp(prefix="disk"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", disk], check=True)
    try:
        tempfile.tempdir = str(disk)
        yield disk
    finally:
        tempfile.tempdir = before
        subprocess.run(["umount", "--lazy", disk], check=True)
        disk.rmdir()
