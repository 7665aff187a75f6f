"""An engine in this process behind the same scheduler as a replica's."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

from diffray.cluster.control.driver import Driver
from diffray.cluster.control.engine_client import Load
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import Event, OpenRequests
from diffray.cluster.control.scheduler import Scheduler
from diffray.cluster.control.weight_changes import (
    AskedChange,
    EngineChange,
    UpdateWeights,
    WeightChanges,
)
from diffray.cluster.frontend.text import Tokenizer
from diffray.components.checkpoints.folder import resolve
from diffray.workers.admission import CheckedRequest
from diffray.workers.changes import ask_trainer
from diffray.workers.engine import Engine
from diffray.workers.messages import ASLEEP, Round, Update
from diffray.workers.setup import build_engine
from diffray.workers.trainer_orders import Received, TrainerOrder, granted

log = logging.getLogger(__name__)

T = TypeVar("T")


class WaitingEngine:
    """A blocking client of an engine in this process: the calling thread runs the rounds."""

    def __init__(self, engine: Engine, steps_per_round: int) -> None:
        self._engine, self.limits = engine, engine.limits
        # All requests belong to one caller, so none is preempted for others (no time slices).
        scheduler = Scheduler(
            self.limits.max_num_seqs,
            self.limits.num_pages,
            sys.maxsize,
            page_size=self.limits.page_size,
        )
        self.driver = Driver(scheduler, steps_per_round)
        self._news: list[Event] = []  # events that `advance` has not returned yet

    @property
    def open(self) -> Collection[int]:
        return self.driver.scheduler.open

    def submit(self, request: CheckedRequest) -> None:
        self.driver.scheduler.submit(request, request.footprint)

    def cancel(self, uid: int) -> None:
        self.driver.scheduler.cancel(uid)

    def advance(self, steps: int | None = None) -> list[Event]:
        """Run one round, or return the events left over from earlier ones.

        Ctrl-C may interrupt it anywhere; the next call then resumes the running requests from what
        they have reported.
        """
        if self._news:
            events, self._news = self._news, []
            return events
        if self.level and self.open:
            raise ValueError(ASLEEP)
        return self._round(steps)

    def apply(self, change: EngineChange) -> str:
        """Run rounds until a change is made; raise ValueError if it is refused."""
        refusals: list[str] = []
        asked = _ask(self._engine, self._weights, change, refusals.append)
        try:
            while not refusals:
                self._news += self._round()
        finally:
            _withdraw(self._engine, self._weights, asked)
        if refusals[0]:
            raise ValueError(refusals[0])
        return asked.change.version

    def ask_trainer(self, order: TrainerOrder) -> Received:
        return granted(ask_trainer(self._engine.changes, order))

    @property
    def _weights(self) -> WeightChanges:
        return self.driver.scheduler.weights

    @property
    def level(self) -> int:
        return self._weights.level

    def _round(self, steps: int | None = None) -> list[Event]:
        driver = self.driver
        if driver.in_round:
            self._engine.cancel_all()
            driver.start_over()
        driver.in_round = True
        order = driver.next(steps)
        events = []
        if order is not None:
            events = driver.take(self._engine.run(order, CheckedRequest.new_sequence))
        driver.in_round = False
        return events

    def release(self) -> None:
        for uid in list(self.open):
            self.cancel(uid)
        self.advance()

    def close(self) -> None:
        """Do nothing: all memory is freed with the engine."""


class LocalEngine:
    """An `EngineClient` over an engine in this process, which runs in its own thread.

    Its clients are coroutines of one event loop at a time.
    """

    def __init__(self, engine: Engine, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        self.limits = engine.limits
        self._engine = engine
        scheduler = Scheduler(
            engine.limits.max_num_seqs,
            engine.limits.num_pages,
            config.max_queued_requests,
            time_slice=config.time_slice,
            page_size=engine.limits.page_size,
        )
        self._lock = threading.Condition()  # guards the driver and the scheduler
        self._driver = Driver(scheduler, config.steps_per_round)
        self._requests = OpenRequests()
        self._requests.failure = "the engine has not been started"
        self._loop: asyncio.AbstractEventLoop | None = None  # of the latest request
        self._closing = False
        self._trainer = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._requests.failure = None
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

    def __exit__(self, *error: object) -> None:
        self.close()

    # As an EngineClient.

    def submit(
        self, request: CheckedRequest, *, priority: int = 0, deadline: float | None = None
    ) -> AsyncGenerator[Update, None]:

        async def queue(end: float | None) -> None:
            with self._lock:
                self._requests.check()
                self._loop = asyncio.get_running_loop()  # its clock is time.monotonic
                self._driver.scheduler.submit(request, request.footprint, priority, end)
                self._lock.notify()

        return self._requests.updates(request.uid, deadline, queue, self._cancel)

    async def apply(self, change: EngineChange) -> str:
        loop = asyncio.get_running_loop()
        refusal: asyncio.Future[str] = loop.create_future()

        def settle(reason: str) -> None:
            if not refusal.done():
                refusal.set_result(reason)

        def done(reason: str) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(settle, reason)

        with self._lock:
            self._requests.check()
            asked = _ask(self._engine, self._weights, change, done)
            self._lock.notify()
        try:
            reason = await refusal
        finally:
            with self._lock:
                _withdraw(self._engine, self._weights, asked)
        self._requests.check()
        if reason:
            raise ValueError(reason)
        return asked.change.version

    async def ask_trainer(self, order: TrainerOrder) -> Received:
        # One at a time; requests continue meanwhile, as one rank has no collectives.
        async with self._trainer:
            return granted(await asyncio.to_thread(ask_trainer, self._engine.changes, order))

    @property
    def _weights(self) -> WeightChanges:
        return self._driver.scheduler.weights

    async def load(self) -> Load:
        with self._lock:
            return self._driver.load()

    async def check_health(self) -> None:
        self._requests.check()

    def _cancel(self, uid: int) -> None:
        with self._lock:
            self._driver.scheduler.cancel(uid)
            self._lock.notify()

    # The thread.

    def _run(self) -> None:
        try:
            while (order := self._next_round()) is not None:
                reply = self._engine.run(order, CheckedRequest.new_sequence)
                with self._lock:
                    self._send(self._driver.take(reply))
        except Exception as error:
            # Whatever the error, requests must not wait forever.
            log.exception("the engine failed")
            self._fail(f"the engine failed: {error}")

    def _next_round(self) -> Round[CheckedRequest] | None:
        """Wait for work; None: the engine is being closed."""
        with self._lock:
            while not self._closing:
                self._send(self._driver.scheduler.expire(time.monotonic()))
                if (order := self._driver.next()) is not None:
                    return order
                self._lock.wait()
            return None

    def _send(self, events: list[Event]) -> None:
        """Deliver events; under the lock, so that none reaches a later request of the same uid."""
        if routed := self._requests.route(events):
            self._on_loop(self._requests.deliver, routed)

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._requests.failure = self._requests.failure or reason
            self._driver.scheduler.fail_all(reason)
        self._on_loop(self._requests.fail, reason)

    def _on_loop(self, call: Callable[[T], None], argument: T) -> None:
        """Call a function on the clients' event loop; only that loop changes the mailboxes."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop was closed, and all streams with it
                self._loop.call_soon_threadsafe(call, argument)


def _ask(
    engine: Engine,
    weights: WeightChanges,
    wanted: EngineChange,
    done: Callable[[str], object],
) -> AskedChange:
    """Ask for a change; given tensors are left where the engine finds them."""
    change = weights.next(wanted)
    asked = weights.ask(change, wanted.in_flight, done)
    source = wanted.source if isinstance(wanted, UpdateWeights) else ""
    if not isinstance(source, str | Path) and engine.changes is not None:
        engine.changes.given[change.number] = source
    return asked


def _withdraw(engine: Engine, weights: WeightChanges, asked: AskedChange) -> None:
    """Drop a change, unless it has started."""
    weights.withdraw(asked)
    if engine.changes is not None:
        engine.changes.given.pop(asked.change.number, None)


def load_local(model: str, config: EngineConfig) -> tuple[LocalEngine, Tokenizer | None]:
    """Load a checkpoint as one rank of this process; call `start` before use."""
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"tensor_parallel_size {config.tensor_parallel_size} needs a cluster; "
            "without one it must be 1"
        )
    engine = build_engine(model, config.rank_options)
    tokenizer = Tokenizer.load(resolve(model), engine.slots.mask_token_id)
    return LocalEngine(engine, config), tokenizer
