"""Structured outputs compiled in a process whose loss does no harm, and kept."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from base64 import b64decode, b64encode
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Any, Final, NamedTuple, TextIO

from diffray.cluster.control.grammar_worker import CPU_S
from diffray.cluster.frontend.text import Tokenizer
from diffray.components.config import InvalidField
from diffray.components.grammar.compile import vocabulary_of
from diffray.components.grammar.structured import StructuredOutputs
from diffray.workers.limits import Limits

_WORKER: Final = "diffray.cluster.control.grammar_worker"
_KEPT: Final = 1024
_AT_ONCE: Final = 8  # forks
_WALL_S: Final = 30.0  # for an answer, even on a busy machine
_START_S: Final = 120.0  # for imports


class NotStarted(RuntimeError):
    """The process to fork from did not start, which is not the request's fault."""


class _Refused(NamedTuple):
    message: str
    field: str | None


class GrammarPool:
    """Compiles structured outputs, for event loops and for callers that wait.

    A fork compiles each, so that none waits for imports or for another request. Requests of a loop
    for the same output share one compilation. Refusals are kept too, so a schema that exceeds the
    time limit does so only once.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self._tokenizer, self._limits, self._worker = tokenizer, limits, _WORKER
        self._kept: OrderedDict[str, bytes | _Refused] = OrderedDict()
        self._compiling: dict[str, asyncio.Task[bytes | _Refused]] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, "grammars")  # for event loops
        self._keeping, self._forking = Lock(), Lock()
        self._process: _Process | None = None
        self._closed = False

    async def compiled(self, outputs: StructuredOutputs, slot_length: int | None) -> bytes:
        """Return the automaton, or the pinned canvas, as bytes; raises InvalidField."""
        asked = _question(outputs, slot_length)
        if (found := self._known(asked)) is None:
            if (task := self._compiling.get(asked)) is None:
                task = self._compiling[asked] = asyncio.create_task(self._in_thread(asked))
                task.add_done_callback(lambda _: self._compiling.pop(asked))
            found = await asyncio.shield(task)  # others may wait for it too
        return _unless_refused(found)

    def compile(self, outputs: StructuredOutputs, slot_length: int | None) -> bytes:
        """Return the same, for a caller outside of an event loop."""
        asked = _question(outputs, slot_length)
        return _unless_refused(self._known(asked) or self._answer(asked))

    def close(self) -> None:
        self._closed = True
        self._threads.submit(self._end)
        self._threads.shutdown(wait=False)

    def _known(self, asked: str) -> bytes | _Refused | None:
        with self._keeping:
            if asked in self._kept:
                self._kept.move_to_end(asked)
            return self._kept.get(asked)

    async def _in_thread(self, asked: str) -> bytes | _Refused:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._answer, asked)

    # Called in threads.

    def _answer(self, asked: str) -> bytes | _Refused:
        found: bytes | _Refused
        try:
            answer = self._ask(asked)
        except (TimeoutError, EOFError) as error:
            found = _Refused(f"structured outputs: compiling took more than {CPU_S:g} s", None)
            if not isinstance(error, EOFError) or not self._is_alive():
                return found  # not known for certain, so it is not kept
        else:
            if "error" in answer:
                found = _Refused(answer["error"], answer["field"])
            else:
                found = b64decode(answer["automaton"])
        with self._keeping:
            self._kept[asked] = found
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def _ask(self, asked: str) -> dict[str, Any]:
        """Return a fork's answer; raises EOFError if it ended without one, at its time limit."""
        ours, theirs = _sockets()
        with ours:
            with theirs:
                self._fork(theirs)
            try:
                answer: dict[str, Any] = _exchange(ours.makefile("rw", encoding="ascii"), asked)
            except ConnectionError:
                raise EOFError from None
            return answer

    def _is_alive(self) -> bool:
        with self._forking:
            return self._process is not None and self._process.is_alive()

    def _fork(self, end: socket.socket) -> None:
        with self._forking:
            if self._process is not None:
                with suppress(OSError):  # it has been lost
                    self._process.pass_on(end)
                    return
                self._process.end()
                self._process = None
            if self._closed:
                raise NotStarted("structured outputs: what compiles them has been shut down")
            process = _Process(self._worker)
            try:
                process.greet(self._greeting())
                process.pass_on(end)
            except (OSError, EOFError):
                process.end()
                raise NotStarted(
                    "structured outputs: the process that compiles them did not start"
                ) from None
            self._process = process

    def _greeting(self) -> str:
        assert self._tokenizer is not None  # or nothing would have been asked
        vocabulary = vocabulary_of(self._tokenizer.fast)
        return json.dumps(
            {
                "vocabulary": {b64encode(text).decode(): ids for text, ids in vocabulary.items()},
                "end_ids": self._limits.eos_token_ids,
                "vocab_size": self._limits.spec.vocab_size,
                "tokenizer": self._tokenizer.fast.backend_tokenizer.to_str(),
            }
        )

    def _end(self) -> None:
        with self._forking:
            if self._process is not None:
                self._process.end()
                self._process = None


def _question(outputs: StructuredOutputs, slot_length: int | None) -> str:
    return json.dumps(outputs.model_dump(exclude_unset=True) | {"slot_length": slot_length})


def _unless_refused(found: bytes | _Refused) -> bytes:
    if isinstance(found, _Refused):
        raise InvalidField(found.message, found.field or "structured_outputs")
    return found


def _sockets() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(_WALL_S)
    return ours, theirs


class _Process:
    """A worker, and the stream of lines to and from it."""

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
        self._stream = self._socket.makefile("rw", encoding="ascii")

    def greet(self, greeting: str) -> None:
        self._socket.settimeout(_START_S)
        _exchange(self._stream, greeting)

    def pass_on(self, end: socket.socket) -> None:
        """Send the process one end of another stream, for a fork to answer."""
        socket.send_fds(self._socket, [b"."], [end.fileno()])

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Kill the process and its forks, which share its session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(OSError):  # from flushing what was not sent
            self._stream.close()
        self._socket.close()


def _exchange(stream: TextIO, line: str) -> Any:
    stream.write(line + "\n")
    stream.flush()
    answer = stream.readline()
    if not answer.endswith("\n"):
        raise EOFError
    return json.loads(answer)
