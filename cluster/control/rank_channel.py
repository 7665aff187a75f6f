"""The coordinator's end of the control channel: one connection to every rank, and heartbeats.

A process that sends no heartbeat for `heartbeat_timeout_s` is assumed hung. Heartbeats come from a
separate thread or event loop, so slow work does not delay them. The watcher counts its polls
instead of reading the clock, because a watcher that was suspended heard nothing.
"""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from diffray.cluster.control.engine_config import BEATS
from diffray.workers.link import (
    HEADER,
    LARGEST,
    FromRank,
    body_length,
    encode,
    hello_decoder,
    rank_decoder,
)
from diffray.workers.messages import Hello, Reply, Round, WireRequest

log = logging.getLogger(__name__)

LOADING = 10  # times the timeout while a process imports or loads, which may hold Python's lock
_POLLS = 4 * BEATS
_LONG = _POLLS // 3  # polls after which silence is logged

T = TypeVar("T")


class Pulse:
    """The heartbeats of another process."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name, self.timeout = name, timeout
        self._polls = 0  # since the last heartbeat

    def beat(self) -> None:
        if self._polls > _LONG:
            log.warning(
                "%s was silent for %.1f s; after %g s (heartbeat_timeout_s) it is assumed hung",
                self.name, self._polls * self.timeout / _POLLS, self.timeout,
            )  # fmt: skip
        self._polls = 0

    async def stops(self) -> None:
        """Wait until there has been no heartbeat for the timeout."""
        while self._polls < _POLLS:
            await asyncio.sleep(self.timeout / _POLLS)
            self._polls += 1


async def answered(call: Awaitable[T], timeout: float) -> T:
    """Return the coordinator's answer; raise TimeoutError if it hangs."""
    pulse = Pulse("the coordinator", timeout)
    answer, silence = asyncio.ensure_future(call), asyncio.create_task(pulse.stops())
    try:
        await asyncio.wait([answer, silence], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise TimeoutError(no_sign(pulse.name, timeout))
        pulse.beat()
        return await answer
    finally:
        answer.cancel()
        silence.cancel()


def no_sign(name: str, timeout: float) -> str:
    return f"{name} sent no heartbeat for {timeout:g} s (heartbeat_timeout_s); assumed hung"


_HELLO_S = 10.0  # for a connection to identify itself
_HELLO_BYTES = 256


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank has ended, which ends the worker group."""

    error: str
    dead: bool  # whether its process has ended


class RankChannel:
    """Accepts the ranks of one worker group, sends to all of them and receives from each.

    Memory is bounded: a rank sends only heartbeats, replies to rounds in flight, and lines for
    `announce`, and strangers are disconnected after one small frame.
    """

    def __init__(
        self, size: int, secret: bytes, timeout: float, announce: Callable[[str], None]
    ) -> None:
        self.size, self.secret = size, secret
        self._timeout = timeout  # of the ranks' heartbeats
        self._announce = announce
        # From the ranks; None: one has closed its connection.
        self.messages: asyncio.Queue[Reply | Failure | None] = asyncio.Queue()
        self.complete = asyncio.Event()  # every rank has connected
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._pulses: dict[int, Pulse] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> int:
        """Listen on a free port of `host` and return the port."""
        self._server = await asyncio.start_server(self._accept, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def broadcast(self, message: Round[WireRequest] | None) -> None:
        """Send to every rank, without waiting: the messages are small."""
        frame = encode(message)
        for writer in self._writers.values():
            writer.write(frame)

    def expect_within(self, timeout: float) -> None:
        """From now on, assume that a rank hangs if it is silent for `timeout` seconds."""
        self._timeout = timeout
        for pulse in self._pulses.values():
            pulse.timeout = timeout

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for writer in self._writers.values():
            writer.close()
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            body = await asyncio.wait_for(_read(reader, _HELLO_BYTES), _HELLO_S)
            rank = self._rank_of(hello_decoder.decode(body))
        except Exception:  # a stranger: the port is open to anyone
            writer.close()
            return
        self._writers[rank] = writer
        self._pulses[rank] = pulse = Pulse(f"rank {rank}", self._timeout)
        if len(self._writers) == self.size:
            self.complete.set()
            if self._server is not None:
                self._server.close()
        self._tasks.add(asyncio.create_task(self._receive(reader, pulse)))
        self._tasks.add(asyncio.create_task(self._watch(pulse)))

    def _rank_of(self, hello: Hello) -> int:
        if not hmac.compare_digest(hello.secret, self.secret):
            raise ConnectionError("wrong secret")
        if hello.rank in self._writers or not 0 <= hello.rank < self.size:
            raise ConnectionError(f"rank {hello.rank} is not expected")
        return hello.rank

    async def _receive(self, reader: asyncio.StreamReader, pulse: Pulse) -> None:
        try:
            while True:
                message: FromRank = rank_decoder.decode(await _read(reader))
                pulse.beat()
                if isinstance(message, str):
                    self.messages.put_nowait(Failure(message, dead=False))
                elif isinstance(message, list):
                    for line in message:
                        self._announce(line)
                elif message is not None:
                    self.messages.put_nowait(message)
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            self.messages.put_nowait(None)

    async def _watch(self, pulse: Pulse) -> None:
        await pulse.stops()
        self.messages.put_nowait(Failure(no_sign(pulse.name, pulse.timeout), dead=True))


async def _read(reader: asyncio.StreamReader, most: int = LARGEST) -> bytes:
    length = body_length(await reader.readexactly(HEADER.size))
    if length > most:
        raise ConnectionError(f"a frame of {length} bytes from an unidentified connection")
    return await reader.readexactly(length)
