"""Applies chat templates in a separate process, which may be lost without harm."""

import asyncio
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from diffray.cluster.api import template_worker
from diffray.cluster.api.template_worker import CPU_S, receive, send

_WALL_S: Final = 30.0  # for an answer, even on a busy machine


class Templates:
    """One conversation at a time; the process starts with the first, and again after a loss."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "template")  # it waits instead of the event loop
        self._connection: socket.socket | None = None
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
            connection = self._connected()
            send(connection, given)
            return receive(connection)
        except (OSError, EOFError):  # TimeoutError is an OSError
            self._end()
            return {"error": f"it took longer than {CPU_S:g} s for this conversation"}
        except BaseException:
            self._end()
            raise

    def _connected(self) -> socket.socket:
        if self._connection is None:
            self._connection, other = socket.socketpair()
            self._connection.settimeout(_WALL_S)
            command = [sys.executable, "-P", template_worker.__file__, str(other.fileno())]
            with other:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # not affected by Ctrl-C
                )
        return self._connection

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
