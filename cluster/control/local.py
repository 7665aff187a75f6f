"""An engine in this process, run by a thread, for callers that are coroutines.

Tests, notebooks and batches without a cluster use it where a replica would use its coordinator.
"""

import asyncio
import heapq
import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from diffray.cluster.control.engine_client import (
    NO_ROUNDS,
    DeadlineExceeded,
    EngineFailed,
    Load,
    Overloaded,
    round_bucket,
)
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import Event, Kind, Mailbox
from diffray.components.prefixes import num_held
from diffray.workers.admission import Limits
from diffray.workers.engine import Engine
from diffray.workers.messages import Request, Update
from diffray.workers.setup import Setup, build_engine
from diffray.workers.text import Tokenizer

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Stream:
    """One request's way back to the coroutine that waits for it."""

    request: Request
    priority: int
    loop: asyncio.AbstractEventLoop
    news: Mailbox = field(default_factory=Mailbox)  # touched by the loop alone
    failure: Exception | None = None  # what its last event raises
    left: bool = False  # nobody waits any more
    admitted: float | None = None  # when, until its first news


class LocalEngine:
    """An `EngineClient` over an engine of this process; its tokens are those of DiffusionLLM.

    A round is at most `steps_per_round` denoising steps; at most `max_queued_requests` wait.
    """

    def __init__(
        self, engine: Engine, *, steps_per_round: int = 4, max_queued_requests: int = 256
    ) -> None:
        self._engine = engine
        self._limits = engine.limits
        self._steps = steps_per_round
        self._most = engine.limits.max_num_seqs + max_queued_requests
        self._wake = threading.Condition()  # guards what stands here
        self._streams: dict[int, _Stream] = {}
        self._arrivals: list[_Stream] = []
        self._cancelled: list[int] = []
        self._failure: EngineFailed | None = EngineFailed("the engine has not been started")
        self._closing = False
        # The thread's own.
        self._queue: list[tuple[int, int, _Stream]] = []  # a heap: priority, arrival
        self._arrived = 0
        self._rounds = 0
        self._round_tokens = list(NO_ROUNDS)
        self._load = self._measure()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        with self._wake:
            self._failure = None
        self._thread.start()

    def close(self) -> None:
        """End the thread; whoever still waits is told so."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._fail(EngineFailed("the engine was closed"))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # As an EngineClient.

    @property
    def limits(self) -> Limits:
        return self._limits

    async def submit(
        self, request: Request, *, priority: int = 0, deadline: float | None = None
    ) -> AsyncGenerator[Update, None]:
        """Yield a request's news until one has a finish reason; closing the generator cancels."""
        loop = asyncio.get_running_loop()
        end = None if deadline is None else loop.time() + deadline
        stream = _Stream(request, priority, loop)
        self._enter(stream)
        try:
            while True:
                try:
                    async with asyncio.timeout_at(end):
                        event = await stream.news.get()
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"the request was not done within {deadline} seconds"
                    ) from None
                if event.update is None:
                    assert stream.failure is not None, "it is set before its event"
                    raise stream.failure
                yield event.update
                if event.ends:
                    return
        finally:
            self._leave(stream)

    async def load(self) -> Load:
        return self._load

    async def check_health(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure))

    def _enter(self, stream: _Stream) -> None:
        uid = stream.request.uid
        with self._wake:
            if self._failure is not None:
                raise EngineFailed(str(self._failure))
            if uid in self._streams:
                raise ValueError(f"request {uid} is running already; give another uid")
            if len(self._streams) >= self._most:
                raise Overloaded(f"{len(self._streams)} requests are running or waiting; try later")
            self._streams[uid] = stream
            self._arrivals.append(stream)
            self._wake.notify()

    def _leave(self, stream: _Stream) -> None:
        """Cancel the stream's request, unless it has ended."""
        uid = stream.request.uid
        with self._wake:
            if self._streams.get(uid) is stream:
                stream.left = True
                del self._streams[uid]
                self._cancelled.append(uid)
                self._wake.notify()

    # The thread.

    def _run(self) -> None:
        try:
            while self._next_orders():
                self._feed()
                if not self._engine.idle:
                    updates = self._engine.step(self._steps)
                    self._hand_out(updates)
                    self._rounds += 1
                    self._round_tokens[round_bucket(sum(len(u.ids) for u in updates))] += 1
                self._load = self._measure()
        except Exception as error:
            # Whatever broke, its requests must not wait for ever.
            log.exception("the engine failed")
            self._fail(EngineFailed(f"the engine failed: {error}"))

    def _next_orders(self) -> bool:
        """Take over what was asked since the last round, waiting if there is nothing to do."""
        with self._wake:
            while not self._orders():
                self._wake.wait()
            if self._closing:
                return False
            arrivals, self._arrivals = self._arrivals, []
            cancelled, self._cancelled = self._cancelled, []
        for uid in cancelled:
            self._engine.cancel(uid)
        for stream in arrivals:
            heapq.heappush(self._queue, (stream.priority, self._arrived, stream))
            self._arrived += 1
        return True

    def _orders(self) -> bool:
        busy = bool(self._queue) or not self._engine.idle
        return busy or self._closing or bool(self._arrivals or self._cancelled)

    def _feed(self) -> None:
        """Give the engine what it can admit now: what it holds, no priority overtakes any more."""
        engine = self._engine
        slots = engine.slots.num_free - len(engine.waiting)
        pages = engine.kv.num_free
        while self._queue:
            stream = self._queue[0][2]
            if stream.left:
                heapq.heappop(self._queue)
                continue
            try:
                sequence = engine.check(stream.request)
            except ValueError as error:
                heapq.heappop(self._queue)
                self._end(stream, error)
                continue
            pages -= self._limits.pages(sequence, sequence.kv_stop)
            pages += num_held(engine.kv.prefixes.find(sequence))
            slots -= 1
            if slots < 0 or pages < 0:
                return
            heapq.heappop(self._queue)
            engine.add(stream.request)
            stream.admitted = time.monotonic()

    def _hand_out(self, updates: list[Update]) -> None:
        """Pass a round's news on, in one call to each event loop."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Event]]] = {}
        with self._wake:
            for update in updates:
                stream = self._streams.get(update.uid)
                if stream is None:
                    continue  # it was left a moment ago
                if stream.admitted is not None:
                    update.ran = time.monotonic() - stream.admitted
                    stream.admitted = None
                event = Event(Kind.UPDATE, update.uid, update)
                news.setdefault(stream.loop, []).append((stream, event))
                if update.finish_reason:
                    del self._streams[update.uid]
        for loop, events in news.items():
            _tell(loop, events)

    def _end(self, stream: _Stream, error: Exception) -> None:
        with self._wake:
            self._streams.pop(stream.request.uid, None)
        _fail(stream, error)

    def _fail(self, failure: EngineFailed) -> None:
        """End every stream, and refuse new ones; the first failure is the one that counts."""
        with self._wake:
            self._failure = self._failure or failure
            reason = str(self._failure)
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            _fail(stream, EngineFailed(reason))

    def _measure(self) -> Load:
        engine = self._engine
        return Load(
            running=len(engine.running),
            waiting=len(engine.waiting) + sum(not s.left for _, _, s in self._queue),
            free_pages=engine.kv.num_free,
            num_pages=self._limits.num_pages,
            preemptions=engine.preemptions,
            forwards=engine.forwards,
            rounds=self._rounds,
            tokens=engine.tokens,
            round_tokens=tuple(self._round_tokens),
        )


def load_local(model: str, config: EngineConfig) -> tuple[LocalEngine, Tokenizer | None]:
    """Load a checkpoint as one rank of this process; the engine has to be started."""
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"tensor_parallel_size {config.tensor_parallel_size} needs a cluster; "
            "without one it must be 1"
        )
    engine, tokenizer = build_engine(model, Setup(**config.setup()))
    local = LocalEngine(
        engine,
        steps_per_round=config.steps_per_round,
        max_queued_requests=config.max_queued_requests,
    )
    return local, tokenizer


def _fail(stream: _Stream, error: Exception) -> None:
    stream.failure = error
    _tell(stream.loop, [(stream, Event(Kind.FAILED, stream.request.uid))])


def _tell(loop: asyncio.AbstractEventLoop, events: Iterable[tuple[_Stream, Event]]) -> None:
    def put() -> None:
        for stream, event in events:
            stream.news.put(event)

    with suppress(RuntimeError):  # the loop was closed, and nobody waits there
        loop.call_soon_threadsafe(put)
