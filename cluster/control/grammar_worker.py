"""Compiles structured outputs, which a client may make endless, in forks of a limited process.

The process reads a vocabulary from its socket, then takes further sockets, each for a fork of its
own to answer. Exceeding the time limit ends a fork; exceeding the memory limit is an error.
"""

import gc
import json
import os
import resource
import signal
import socket
import sys
from base64 import b64decode, b64encode
from typing import Any, Final

from tokenizers import Tokenizer

from diffray.components.grammar.compile import Grammars
from diffray.components.grammar.structured import StructuredOutputs

CPU_S: Final = 2.0  # of CPU time, per schema
_MEMORY: Final = 2**29  # bytes, in addition to the process's memory at startup


def serve_forks() -> None:
    """Take the vocabulary; then answer each stream that arrives in a fork."""
    _limit_memory()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no fork becomes a zombie
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        with channel.makefile("rw", encoding="ascii") as stream:
            grammars = _grammars(json.loads(stream.readline()))
            stream.write("{}\n")
        gc.freeze()  # a collection would write to, and so copy, shared memory
        while ends := socket.recv_fds(channel, 1, 1)[1]:
            if os.fork() == 0:
                channel.close()
                _answer(socket.socket(fileno=ends[0]), grammars)
                os._exit(0)
            os.close(ends[0])


def _grammars(given: dict[str, Any]) -> Grammars:
    tokenizer = Tokenizer.from_str(given["tokenizer"])
    grammars = Grammars(
        {b64decode(text): ids for text, ids in given["vocabulary"].items()},
        given["end_ids"],
        given["vocab_size"],
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
    )
    grammars.prepare()
    return grammars


def _answer(end: socket.socket, grammars: Grammars) -> None:
    with end, end.makefile("rw", encoding="ascii") as stream:
        # SIGPROF has no handler, so the system ends the process even inside one C call.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        reply: dict[str, str | None]
        try:
            given = json.loads(stream.readline())
            slot_length = given.pop("slot_length")
            compiled = grammars.compile(StructuredOutputs(**given), slot_length)
            reply = {"automaton": b64encode(compiled).decode()}
        except MemoryError:
            words = f"it took more than {_MEMORY >> 20} MiB of memory"
            reply = {"error": words, "field": None}
        except Exception as error:
            reply = {"error": str(error), "field": getattr(error, "field", None)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        stream.write(json.dumps(reply) + "\n")


def _limit_memory() -> None:
    with open("/proc/self/status") as status:
        (data,) = (line.split()[1] for line in status if line.startswith("VmData"))
    most = int(data) * 1024 + _MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    serve_forks()
