"""Servers that are started as a newcomer starts them, and every way of ending one."""

import os
import pty
import select
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tools.first_contact.install import Place
from tools.serve_process import ServeProcess, free_port

READY_S = 300.0
END_S = 90.0


@contextmanager
def server(
    place: Place, name: str, command: str, cwd: Path, settings: dict[str, str], port: int = 0
) -> Iterator["Terminal"]:
    """Run a command in a terminal of its own, with a port for PORT; leaves nothing behind."""
    home = place.folder / name
    home.mkdir(exist_ok=True)
    port = port or free_port()
    main, side = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command.replace('PORT', str(port))}"],
        cwd=cwd,
        env=place.environment | settings | {"HOME": str(home), "TMPDIR": str(home)},
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it controls them
    )
    os.close(side)
    running = Terminal(ServeProcess(process, home, port), main)
    try:
        yield running
    finally:
        running.close()
        for pid in running.served.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


class Terminal:
    """The terminal that a server runs in."""

    def __init__(self, served: ServeProcess, main: int) -> None:
        self.served = served
        self._main: int | None = main
        self.screen = ""
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(main,), daemon=True)
        self._reader.start()

    def _read(self, main: int) -> None:
        # A read that waits would keep the terminal open when it is closed.
        with suppress(OSError):  # nothing writes to it any more
            while not self._closing.is_set():
                if select.select([main], [], [], 0.1)[0]:
                    data = os.read(main, 65536).decode(errors="replace")
                    self.screen += data.replace("\r\n", "\n")

    def wait_ready(self, words: str = " is ready at ") -> None:
        """Wait for the line that says that the model can be asked."""
        end = time.monotonic() + READY_S
        while words not in self.screen:
            assert self.served.process.poll() is None, f"it ended: {self.screen[-600:]}"
            assert time.monotonic() < end, f"it is not ready: {self.screen[-600:]}"
            time.sleep(0.1)

    def close(self) -> None:
        """Close the terminal, as closing its window does."""
        if self._main is not None:
            self._closing.set()
            self._reader.join()
            os.close(self._main)
            self._main = None

    def press_ctrl_c(self) -> None:
        assert self._main is not None
        os.write(self._main, b"\x03")

    def press_ctrl_c_twice(self) -> None:
        self.press_ctrl_c()
        time.sleep(0.5)  # closer together, they count as one
        self.press_ctrl_c()

    def left(self) -> list[str]:
        """Return what is still there: processes, the port."""
        found = [f"{pid}: {line[:80]}" for pid, line in self.served.processes().items()]
        try:
            socket.create_server(("127.0.0.1", self.served.port)).close()
        except OSError:
            found.append(f"port {self.served.port}")
        return found


ENDINGS: dict[str, Callable[[Terminal], None]] = {
    "Ctrl-C": Terminal.press_ctrl_c,
    "SIGTERM": lambda terminal: terminal.served.process.terminate(),
    "closing its terminal": Terminal.close,
    "a second Ctrl-C": Terminal.press_ctrl_c_twice,
    "SIGKILL": lambda terminal: terminal.served.process.kill(),
    "SIGTERM to its group": lambda it: os.killpg(it.served.process.pid, signal.SIGTERM),
}


def end(terminal: Terminal, way: Callable[[Terminal], None]) -> None:
    """End a server while a client asks it; nothing may be left, and nothing alarming printed."""
    stop = threading.Event()
    client = threading.Thread(target=_keep_asking, args=(terminal.served.url, stop), daemon=True)
    client.start()
    time.sleep(1)
    try:
        way(terminal)
        limit = time.monotonic() + END_S
        while left := terminal.left():
            assert time.monotonic() < limit, f"left after {END_S:g} s: {'; '.join(left)}"
            time.sleep(0.2)
    finally:
        stop.set()
        client.join()
    terminal.served.process.wait()
    for alarm in ("Traceback", "A worker died or was killed", "The program will terminate"):
        assert alarm not in terminal.screen, terminal.screen[-600:]


def _keep_asking(url: str, stop: threading.Event) -> None:
    body = b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}'
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    while not stop.wait(0.02):
        with suppress(OSError), urllib.request.urlopen(asked, timeout=5) as answer:
            answer.read()
