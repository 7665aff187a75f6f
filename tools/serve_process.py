"""Runs `diffray serve` as a process with its own home and temporary folder."""

import fcntl
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path

READY_S = 300.0  # enough on a busy machine


def free_port() -> int:
    """Return a port that neither the kernel nor Ray assigns to another process meanwhile."""
    ports = list(range(31_100, 32_768))
    random.SystemRandom().shuffle(ports)  # hypothesis seeds the other generators
    for port in ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@dataclass(frozen=True)
class ServeProcess:
    """The running command; its output goes to a file, and its processes' TMPDIR is `folder`."""

    process: subprocess.Popen[bytes]
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def wait_for(self, words: str, count: int) -> None:
        """Wait until the output contains `words` at least `count` times."""
        end = time.monotonic() + READY_S
        while self.said.count(words) < count:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end, self.said
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Send SIGINT to the whole process group, as Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def pid(self, name: str) -> int:
        """Return the id of the only process with this name."""
        (found,) = (pid for pid, line in self.processes().items() if name in line)
        return found

    def server_pid(self) -> int:
        """Return the id of the process that does the work: a child of the one that was started."""
        line = self.processes()[self.process.pid]
        (found,) = (
            p for p, other in self.processes().items() if other == line and p != self.process.pid
        )
        return found

    def files(self) -> set[Path]:
        """Return what the processes keep outside the folder: shared memory."""
        found = set()
        for pid in self.processes():
            with suppress(OSError):
                for entry in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    if "/dev/shm/" in entry and "(deleted)" not in entry:
                        found.add(Path(entry.split(maxsplit=5)[5]))
        return found

    def left(self, files: set[Path]) -> list[str]:
        """Return what remains of a server that has ended: processes, the port, files."""
        found = [f"{pid}: {line}" for pid, line in self.processes().items()]
        found += [str(file) for file in files if file.exists()]
        try:
            socket.create_server(("127.0.0.1", self.port)).close()
        except OSError:
            found.append(f"port {self.port}")
        return found

    def is_gone(self, files: set[Path], within_s: float) -> float:
        """Wait until nothing of a server remains; return the seconds that this took."""
        begin = time.monotonic()
        while left := self.left(files):
            assert time.monotonic() < begin + within_s, left
            time.sleep(0.1)
        return time.monotonic() - begin

    def processes(self) -> dict[int, str]:
        """Return the processes of this command and their descendants: id and name."""
        mark = f"TMPDIR={self.folder}".encode()
        names, parents, found = {}, {}, set()
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            with suppress(OSError):  # it ended meanwhile, or belongs to another user
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                if not line:
                    continue  # a kernel thread, or a zombie
                names[pid], parents[pid] = line.decode().strip(), int(_stat(pid)[1])
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.add(pid)
        # Some processes overwrite their environment with their names; find them by parent.
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return {pid: names[pid] for pid in found}

    def listening(self) -> set[tuple[str, int]]:
        """Return the addresses on which the command's processes listen."""
        inodes = set()
        for pid in self.processes():
            with suppress(OSError):
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):  # it was closed meanwhile
                        inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    host, port = words[1].split(":")
                    found.add((_host(host), int(port, 16)))
        return found

    def processor_seconds(self) -> float:
        """Return the processor seconds of all processes since they started."""
        return sum(map(_ticks, self.processes())) / os.sysconf("SC_CLK_TCK")

    def busiest(self, name: str, seconds: float = 0.3) -> int:
        """Return the id of the process of this name that uses the most CPU time."""
        pids = [pid for pid, line in self.processes().items() if name in line]
        before = {pid: _ticks(pid) for pid in pids}
        time.sleep(seconds)
        return max(pids, key=lambda pid: _ticks(pid) - before[pid])


@contextmanager
def starting_ray() -> Iterator[None]:
    """Wait until no other process on this machine starts a Ray, and keep others from it.

    Two that start at once on few cores may need longer than Ray waits for its own processes. A
    record lock, as forks do not inherit those.
    """
    with Path(f"/tmp/diffray-starts-ray-{os.getuid()}").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


@contextmanager
def serve_process(
    *arguments: str, port: int | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[ServeProcess]:
    """Run `diffray serve` with these arguments, on a free port; leave nothing behind.

    `settings` extend the environment of a user who has never used Ray.
    """
    port = port or free_port()
    # Ray's sockets are in it, and a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="serve", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        starting = ExitStack()
        starting.enter_context(starting_ray())
        with (folder / "said").open("wb") as said:
            process = subprocess.Popen(
                serve_command("--port", str(port), *arguments),
                env=environment(folder) | dict(settings or {}),
                cwd=folder,
                stdout=said,
                stderr=said,
                start_new_session=True,
                preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # under nohup
            )
        running = ServeProcess(process, folder, port)
        watching = threading.Thread(target=_close_when_ray_is_up, args=(running, starting))
        watching.start()
        try:
            yield running
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
            for pid in running.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            watching.join()


def _close_when_ray_is_up(server: ServeProcess, starting: ExitStack) -> None:
    with starting:
        while server.process.poll() is None and "Loading" not in server.said:
            time.sleep(0.1)


def serve_command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).parent / "diffray"), "serve", *arguments]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a user who has never used Ray."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    return {"OMP_NUM_THREADS": "1"} | kept | {"HOME": str(folder), "TMPDIR": str(folder)}


def _host(text: str) -> str:
    """Return an address of the kernel's tables, which have each word's bytes reversed."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _ticks(pid: int) -> int:
    return int(_stat(pid)[11]) + int(_stat(pid)[12])
