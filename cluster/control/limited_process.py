"""A process for work that a client may make endless: it has limits, and its loss does no harm.

It answers each line of JSON that it reads from a socket with another. Exceeding the time limit ends
the process; exceeding the memory limit is an error.
"""

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Any, Final, TextIO

Json = dict[str, Any]
Answer = Callable[[Json], Json]

_WALL_S: Final = 30.0  # for an answer, even on a busy machine
_START_S: Final = 120.0  # for imports
_MEMORY: Final = 2**29  # bytes, in addition to the process's memory at startup
_AT_ONCE: Final = 8  # forks


class OutOfTime(Exception):
    """The process ran into its time limit, or died for another reason."""


class NotStarted(Exception):
    """The process to fork from did not start."""


class Refused(ValueError):
    """The process's error, and the field that it names."""

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class ForkingProcess:
    """Answers each request in a fork, so that none waits for imports or for another request.

    `module` calls `serve_forks`. `greeting` returns the first message, which all forks share.
    """

    def __init__(self, module: str, greeting: Callable[[], Json]) -> None:
        self._module, self._greeting = module, greeting
        self._threads = ThreadPoolExecutor(_AT_ONCE, module)
        self._lock = Lock()  # of the process
        self._process: _Process | None = None

    async def ask(self, given: Json) -> Json:
        """Return the answer; raises OutOfTime, Refused or NotStarted."""
        return await _answer_of(self._threads, self._ask, given)

    def ask_waiting(self, given: Json) -> Json:
        """Return the answer as `ask` does, for a caller outside of an event loop."""
        return _unless_refused(self._ask(given))

    def close(self) -> None:
        self._threads.submit(self._end)
        self._threads.shutdown(wait=False)

    # Called only in the threads.

    def _ask(self, given: Json) -> Any:
        ours, theirs = _sockets()
        with ours:
            with theirs:
                self._fork(theirs)
            try:
                return _exchange(ours.makefile("rw", encoding="ascii"), given)
            except (OSError, EOFError):
                raise OutOfTime from None

    def _fork(self, end: socket.socket) -> None:
        with self._lock:
            if self._process is not None:
                with suppress(OSError):  # it has been lost
                    self._process.pass_on(end)
                    return
                self._process.end()
                self._process = None
            process = _Process(self._module)
            try:
                process.greet(self._greeting())
                process.pass_on(end)
            except (OSError, EOFError):
                process.end()
                raise NotStarted from None
            self._process = process

    def _end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None


async def _answer_of(threads: ThreadPoolExecutor, ask: Answer, given: Json) -> Json:
    return _unless_refused(await asyncio.get_running_loop().run_in_executor(threads, ask, given))


def _unless_refused(answer: Json) -> Json:
    if "error" in answer:
        raise Refused(answer["error"], answer["field"])
    return answer


def _sockets() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(_WALL_S)
    return ours, theirs


class _Process:
    """A module that runs as a process, and the stream of lines to and from it."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = _sockets()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # not affected by Ctrl-C
            )
        self.stream = self._socket.makefile("rw", encoding="ascii")

    def greet(self, greeting: Json) -> None:
        self._socket.settimeout(_START_S)
        _exchange(self.stream, greeting)

    def pass_on(self, end: socket.socket) -> None:
        """Send the process one end of another stream, for a fork to answer."""
        socket.send_fds(self._socket, [b"."], [end.fileno()])

    def end(self) -> None:
        """Kill the process and its forks, which share its session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(OSError):  # from flushing what was not sent
            self.stream.close()
        self._socket.close()


def _exchange(stream: TextIO, given: Json) -> Any:
    stream.write(json.dumps(given) + "\n")
    stream.flush()
    answer = stream.readline()
    if not answer.endswith("\n"):
        raise EOFError
    return json.loads(answer)


def serve_forks(greet: Answer, answer: Answer, cpu_s: float) -> None:
    """Pass the first line to `greet`; then answer each stream that arrives in a fork of its own."""
    _limit_memory()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no fork becomes a zombie
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        with channel.makefile("rw", encoding="ascii") as stream:
            stream.write(json.dumps(greet(json.loads(stream.readline()))) + "\n")
        gc.freeze()  # a collection would write to, and so copy, shared memory
        while ends := socket.recv_fds(channel, 1, 1)[1]:
            if os.fork() == 0:
                channel.close()
                _answer_lines(socket.socket(fileno=ends[0]), answer, cpu_s)
                os._exit(0)
            os.close(ends[0])


def _answer_lines(end: socket.socket, answer: Answer, cpu_s: float) -> None:
    with end, end.makefile("rw", encoding="ascii") as stream:
        for line in stream:
            # SIGPROF has no handler, so the system ends the process even inside one C call.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                reply = json.dumps(answer(json.loads(line)))
            except MemoryError:
                reply = _error(f"it took more than {_MEMORY >> 20} MiB of memory")
            except Exception as error:
                reply = _error(str(error), getattr(error, "field", None))
            signal.setitimer(signal.ITIMER_PROF, 0)
            stream.write(reply + "\n")
            stream.flush()


def _error(message: str, field: str | None = None) -> str:
    return json.dumps({"error": message, "field": field})


def _limit_memory() -> None:
    with open("/proc/self/status") as status:
        (data,) = (line.split()[1] for line in status if line.startswith("VmData"))
    most = int(data) * 1024 + _MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
