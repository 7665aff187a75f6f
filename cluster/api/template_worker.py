"""A process that applies chat templates, which are code of a checkpoint and may run forever.

It runs as a file and imports neither diffray nor torch. A frame is 8 bytes of length, then JSON:
`render_jinja_template`'s arguments in, {"text": ...} or {"error": ...} out. Exceeding the time
limit ends the process; exceeding the memory or text limit is an error.
"""

import json
import resource
import signal
import socket
import sys
from typing import Any, Final

CPU_S: Final = 2.0  # of CPU time, per conversation
MEMORY: Final = 2**29  # bytes, in addition to the process's memory at startup
LONGEST: Final = 2**24  # characters of a prompt


def send(connection: socket.socket, value: object) -> None:
    data = json.dumps(value).encode()
    connection.sendall(len(data).to_bytes(8, "big") + data)


def receive(connection: socket.socket) -> Any:
    """Return the next frame; raise EOFError if the other side is gone."""
    return json.loads(_read(connection, int.from_bytes(_read(connection, 8), "big")))


def _read(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main(connection: socket.socket) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    _bound_memory()
    while True:
        try:
            given = receive(connection)
        except EOFError:
            return
        # SIGPROF is not handled, so the system ends the process even inside one C call.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            made: Any = render_jinja_template(**given)
            text = made[0][0]
            if len(text) > LONGEST:
                raise ValueError(f"it made {len(text)} characters, more than {LONGEST}")
            answer = {"text": text}
            text.encode()
        except MemoryError:
            answer = {"error": f"it took more than {MEMORY >> 20} MiB of memory"}
        except Exception as error:  # a template may raise anything
            line = getattr(error, "lineno", None)
            where = f" (line {line} of the template)" if line else ""
            answer = {"error": f"{error}{where}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, answer)


def _bound_memory() -> None:
    with open("/proc/self/status") as status:
        (data,) = (line.split()[1] for line in status if line.startswith("VmData"))
    most = int(data) * 1024 + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
