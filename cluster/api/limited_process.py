"""A process for work that a client may make endless: it has limits, and may be lost without harm.

It reads lines of JSON from a socket and answers each with another. Exceeding the time limit ends
the process; exceeding the memory limit is an error.
"""

import asyncio
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
from typing import Any, Final, TextIO

Json = dict[str, Any]

_WALL_S: Final = 30.0  # for an answer, even on a busy machine
_MEMORY: Final = 2**29  # bytes, in addition to the process's memory at startup


class OutOfTime(Exception):
    """The process was ended by its time limit, or has died of something else."""


class Refused(ValueError):
    """The process's error, and the field that it names."""

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class LimitedProcess:
    """One request at a time; the process starts with the first, and again after a loss.

    `module` calls `serve`. `greeting` makes the first line that a new process gets.
    """

    def __init__(self, module: str, greeting: Callable[[], Json] | None = None) -> None:
        self._module, self._greeting = module, greeting
        self._thread = ThreadPoolExecutor(1, module)  # it waits instead of the event loop
        self._stream: TextIO | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def ask(self, given: Json) -> Json:
        """Return the answer; raises OutOfTime or Refused."""
        loop = asyncio.get_running_loop()
        answer: Json = await loop.run_in_executor(self._thread, self._ask, given)
        if "error" in answer:
            raise Refused(answer["error"], answer["field"])
        return answer

    def start(self) -> None:
        """Start the process, so that the first request need not wait for it."""
        self._thread.submit(self._connected)

    def close(self) -> None:
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    # For the thread only.

    def _ask(self, given: Json) -> Any:
        try:
            return _exchange(self._connected(), given)
        except (OSError, EOFError):  # TimeoutError is an OSError
            self._end()
            self.start()  # for the next one
            raise OutOfTime from None
        except BaseException:
            self._end()
            raise

    def _connected(self) -> TextIO:
        if self._stream is None:
            ours, theirs = socket.socketpair()
            ours.settimeout(_WALL_S)
            with ours, theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # not affected by Ctrl-C
                )
                self._stream = ours.makefile("rw", encoding="ascii")  # keeps the socket open
            if self._greeting is not None:
                _exchange(self._stream, self._greeting())
        return self._stream

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._stream is not None:
            with suppress(OSError):  # of what was not sent
                self._stream.close()
            self._stream = None


def _exchange(stream: TextIO, given: Json) -> Any:
    stream.write(json.dumps(given) + "\n")
    stream.flush()
    answer = stream.readline()
    if not answer.endswith("\n"):
        raise EOFError
    return json.loads(answer)


def serve(answer: Callable[[Json], Json], cpu_s: float) -> None:
    """Answer lines in this process, with so much processor time for each."""
    _limit_memory()
    with socket.socket(fileno=int(sys.argv[1])).makefile("rw", encoding="ascii") as stream:
        for line in stream:
            # SIGPROF is not handled, so the system ends the process even inside one C call.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                told = json.dumps(answer(json.loads(line)))
            except MemoryError:
                told = _error(f"it took more than {_MEMORY >> 20} MiB of memory")
            except Exception as error:
                told = _error(str(error), getattr(error, "field", None))
            signal.setitimer(signal.ITIMER_PROF, 0)
            stream.write(told + "\n")
            stream.flush()


def _error(told: str, field: str | None = None) -> str:
    return json.dumps({"error": told, "field": field})


def _limit_memory() -> None:
    with open("/proc/self/status") as status:
        (data,) = (line.split()[1] for line in status if line.startswith("VmData"))
    most = int(data) * 1024 + _MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
