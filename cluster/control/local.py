"""An engine in this process behind the same scheduler as a replica's."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from diffray.cluster.control.driver import Driver
from diffray.cluster.control.engine_client import EngineFailed, Load
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import Event, Kind, Mailbox, updates_from
from diffray.cluster.control.scheduler import Scheduler
from diffray.components.sequence import Sequence
from diffray.workers.admission import CheckedRequest, Limits
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Round, Update
from diffray.workers.setup import build_engine
from diffray.workers.text import Tokenizer

log = logging.getLogger(__name__)


def run_here(engine: Engine, driver: Driver, steps: int | None = None) -> list[Event]:
    """Run one round in the calling thread.

    Ctrl-C may interrupt it anywhere: the next call then resumes what ran from what was reported.
    """
    if driver.in_round:
        for sequence in [*engine.running, *engine.waiting]:
            engine.cancel(sequence.uid)
        driver.start_over()
    driver.in_round = True
    order = driver.next(steps)
    events = [] if order is None else driver.take(engine.run(order, _sequence))
    driver.in_round = False
    return events


def _sequence(checked: CheckedRequest) -> Sequence:
    return checked.new_sequence()


@dataclass(slots=True, eq=False)
class _Stream:
    """One request's way back to the coroutine that waits for it."""

    loop: asyncio.AbstractEventLoop
    mailbox: Mailbox = field(default_factory=Mailbox)  # touched by the loop alone


class LocalEngine:
    """An `EngineClient` over an engine of this process, which a thread runs."""

    def __init__(self, engine: Engine, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        self._engine = engine
        self._limits = engine.limits
        self._lock = threading.Condition()  # guards all below but the engine
        scheduler = Scheduler.of(
            engine.limits, config.max_queued_requests, time_slice=config.time_slice
        )
        self._driver = Driver(scheduler, config.steps_per_round)
        self._streams: dict[int, _Stream] = {}
        self._failure: str | None = "the engine has not been started"
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        with self._lock:
            self._failure = None
        self._thread.start()

    def close(self) -> None:
        """End the thread; every open request fails."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._fail("the engine was closed")

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
        self, request: CheckedRequest, *, priority: int = 0, deadline: float | None = None
    ) -> AsyncGenerator[Update, None]:
        """Yield a request's updates; see EngineClient."""
        stream = _Stream(asyncio.get_running_loop())
        with self._lock:
            if self._failure is not None:
                raise EngineFailed(self._failure)
            if request.uid in self._streams:
                raise ValueError(f"request {request.uid} is running already; give another uid")
            end = None if deadline is None else time.monotonic() + deadline  # the loop's clock too
            self._driver.scheduler.submit(request, request.footprint, priority, end)
            self._streams[request.uid] = stream
            self._lock.notify()
        try:
            async with aclosing(updates_from(stream.mailbox, deadline, end)) as updates:
                async for update in updates:
                    yield update
        finally:
            with self._lock:
                if self._streams.get(request.uid) is stream:
                    del self._streams[request.uid]
                    self._driver.scheduler.cancel(request.uid)
                    self._lock.notify()

    async def load(self) -> Load:
        with self._lock:
            return self._driver.load()

    async def check_health(self) -> None:
        if self._failure is not None:
            raise EngineFailed(self._failure)

    # The thread.

    def _run(self) -> None:
        try:
            while (order := self._next_round()) is not None:
                reply = self._engine.run(order, _sequence)
                with self._lock:
                    self._tell(self._driver.take(reply))
        except Exception as error:
            # Whatever broke, its requests must not wait for ever.
            log.exception("the engine failed")
            self._fail(f"the engine failed: {error}")

    def _next_round(self) -> Round[CheckedRequest] | None:
        """Wait for work; None: the engine is being closed."""
        with self._lock:
            while not self._closing:
                self._tell(self._driver.scheduler.expire(time.monotonic()))
                if (order := self._driver.next()) is not None:
                    return order
                self._lock.wait()
            return None

    def _tell(self, events: list[Event]) -> None:
        """Pass events on, in one call to each event loop; the caller holds the lock."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Event]]] = {}
        for event in events:
            stream = self._streams.get(event.uid)
            if stream is None:
                continue  # its caller has just left
            if event.ends:
                del self._streams[event.uid]
            batches.setdefault(stream.loop, []).append((stream.mailbox, event))
        for loop, batch in batches.items():
            with suppress(RuntimeError):  # the loop was closed, so nobody waits there
                loop.call_soon_threadsafe(_deliver, batch)

    def _fail(self, reason: str) -> None:
        """Fail every request, and refuse new ones; the first failure is the one that counts."""
        with self._lock:
            self._failure = self._failure or reason
            self._driver.scheduler.fail_all(self._failure)
            self._tell([Event(Kind.FAILED, uid, reason=self._failure) for uid in self._streams])


def load_local(model: str, config: EngineConfig) -> tuple[LocalEngine, Tokenizer | None]:
    """Load a checkpoint as one rank of this process; the engine has to be started."""
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"tensor_parallel_size {config.tensor_parallel_size} needs a cluster; "
            "without one it must be 1"
        )
    engine, tokenizer = build_engine(model, EngineOptions(**config.setup()))
    return LocalEngine(engine, config), tokenizer


def _deliver(batch: list[tuple[Mailbox, Event]]) -> None:
    for mailbox, event in batch:
        mailbox.put(event)
