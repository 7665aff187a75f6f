"""Applies chat templates in a separate process, which may be lost without harm."""

import asyncio
import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, TextIO

from diffray.cluster.api import template_worker
from diffray.cluster.api.template_worker import CPU_S

_WALL_S: Final = 30.0  # for an answer, even on a busy machine


class Templates:
    """One conversation at a time; the process starts with the first, and again after a loss."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "template")  # it waits instead of the event loop
        self._stream: TextIO | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def render(self, given: dict[str, Any]) -> str:
        """Return the text of `render_jinja_template`; raise ValueError with its error."""
        loop = asyncio.get_running_loop()
        answer: dict[str, str] = await loop.run_in_executor(self._thread, self._ask, given)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]

    def start(self) -> None:
        """Start the process, so that the first conversation need not wait for it."""
        self._thread.submit(self._connected)

    def close(self) -> None:
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    # For the thread only.

    def _ask(self, given: dict[str, Any]) -> Any:
        try:
            stream = self._connected()
            stream.write(json.dumps(given) + "\n")
            stream.flush()
            answer = stream.readline()
            if not answer.endswith("\n"):
                raise EOFError
            return json.loads(answer)
        except (OSError, EOFError):  # TimeoutError is an OSError
            self._end()
            return {"error": f"it took longer than {CPU_S:g} s for this conversation"}
        except BaseException:
            self._end()
            raise

    def _connected(self) -> TextIO:
        if self._stream is None:
            ours, theirs = socket.socketpair()
            ours.settimeout(_WALL_S)
            command = [sys.executable, "-P", template_worker.__file__, str(theirs.fileno())]
            with ours, theirs:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # not affected by Ctrl-C
                )
                self._stream = ours.makefile("rw", encoding="ascii")  # keeps the socket open
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
