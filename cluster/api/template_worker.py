"""A process that applies chat templates, which are code of a checkpoint and may run forever.

It runs as a file and imports neither diffray nor torch. Lines of JSON: `render_jinja_template`'s
arguments in, {"text": ...} or {"error": ...} out. Exceeding the time limit ends the process;
exceeding the memory or text limit is an error.
"""

import json
import resource
import signal
import socket
import sys
from typing import Any, Final, TextIO

CPU_S: Final = 2.0  # of CPU time, per conversation
MEMORY: Final = 2**29  # bytes, in addition to the process's memory at startup
LONGEST: Final = 2**24  # characters of a prompt


def main(stream: TextIO) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    _bound_memory()
    for line in stream:
        # SIGPROF is not handled, so the system ends the process even inside one C call.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            made: Any = render_jinja_template(**json.loads(line))
            text = made[0][0]
            if len(text) > LONGEST:
                raise ValueError(f"it made {len(text)} characters, more than {LONGEST}")
            answer = {"text": text}
            text.encode()
        except MemoryError:
            answer = {"error": f"it took more than {MEMORY >> 20} MiB of memory"}
        except Exception as error:  # a template may raise anything
            number = getattr(error, "lineno", None)
            where = f" (line {number} of the template)" if number else ""
            answer = {"error": f"{error}{where}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


def _bound_memory() -> None:
    with open("/proc/self/status") as status:
        (data,) = (line.split()[1] for line in status if line.startswith("VmData"))
    most = int(data) * 1024 + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])).makefile("rw", encoding="ascii"))
