"""The actor that runs one replica's diffusion loop over its worker group.

It handles integers only and imports no torch. Its event loop never waits for the ranks: while a
round is in flight, the next one is planned.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import ray
from ray.util.placement_group import PlacementGroup

from diffray.cluster.control.actors import Restarts, announce, continuing
from diffray.cluster.control.driver import Driver
from diffray.cluster.control.engine_client import (
    EngineFailed,
    Load,
    Overloaded,
    Poisonous,
    Refusal,
)
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import AGAIN, NO_REQUEST, Bulletin, Event, Kind, encode_events
from diffray.cluster.control.scheduler import Scheduler
from diffray.cluster.control.weight_changes import InFlight, WeightChanges
from diffray.cluster.control.worker_group import WorkerGroup, WorkersLost
from diffray.workers.limits import Limits
from diffray.workers.messages import Change, Footprint, WireRequest
from diffray.workers.process import Process, own_process
from diffray.workers.trainer_orders import Received, TrainerOrder, lost

log = logging.getLogger(__name__)

_TICK_S = 0.1  # between checks of deadlines
_USEFUL_S = 30.0  # a worker group that was idle for this long was useful too


class AskedOrder(NamedTuple):
    """A trainer's order, and its result."""

    order: TrainerOrder
    done: asyncio.Future[Received]


class Coordinator:
    """Supervises a worker group, and sends it rounds."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        group: PlacementGroup,
        weights: Change | None = None,
        *,
        make_workers: Callable[[str, EngineConfig, PlacementGroup], WorkerGroup] = WorkerGroup,
    ) -> None:
        self.model, self.config, self.group = model, config, group
        self._make_workers = make_workers
        self.workers: WorkerGroup | None = None
        self._weights = weights  # of another coordinator's ranks; None: the checkpoint's
        # Until `start` is done. Requests that it takes are lost; the replica submits them again.
        self.driver = self._new_driver(config.max_num_seqs, 1)
        self._changes: dict[int, asyncio.Future[str]] = {}  # results by the changes' numbers
        self.failure: str | None = None
        self.bulletin = Bulletin()
        self.restarts = Restarts("the worker group", config.max_restarts)
        self._useful = False  # whether these ranks have answered anything
        self._ready = 0.0  # when they were ready
        self._work = asyncio.Event()  # a request arrived or left
        self._trainer: AskedOrder | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # The replica's calls.

    async def start(self) -> Limits:
        """Start the ranks; return their engine's limits."""
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        await self.restarts.start(self._start_workers)
        assert self.workers is not None and self.workers.limits is not None
        limits = self.workers.limits
        self.driver = self._new_driver(limits.max_num_seqs, limits.num_pages)
        self._tasks = [asyncio.create_task(self._drive()), asyncio.create_task(self._expire())]
        return limits

    def _new_driver(self, slots: int, pages: int) -> Driver:
        config = self.config
        scheduler = Scheduler(
            slots,
            pages,
            max_waiting=config.max_queued_requests,
            check_every=config.check_every,
            time_slice=config.time_slice,
            page_size=config.page_size,
            weights=WeightChanges(self._weights),
        )
        return Driver(scheduler, config.steps_per_round, config.rounds_in_flight)

    async def submit(
        self,
        request: WireRequest,
        footprint: Footprint,
        priority: int,
        deadline: float | None,
    ) -> Refusal | None:
        """Queue a request, or return why not; `deadline` is in seconds from now."""
        if self.failure:
            return Refusal(EngineFailed, self.failure)
        now, scheduler = time.monotonic(), self.driver.scheduler
        if (overdue := self.restarts.overdue(now)) and request.uid not in scheduler.open:
            return Refusal(EngineFailed, overdue)
        try:
            scheduler.submit(
                request, footprint, priority, None if deadline is None else now + deadline
            )
        except (Overloaded, Poisonous) as error:
            return Refusal(type(error), str(error))
        self._work.set()
        return None

    async def cancel(self, uid: int) -> None:
        self.driver.scheduler.cancel(uid)
        self._work.set()

    async def change(self, change: Change, in_flight: InFlight) -> str:
        """Make a change; return why it was refused, or "". A repeated call returns the same."""
        if self.failure:
            return self.failure
        weights = self.driver.scheduler.weights
        if change.number == weights.current.number:
            return ""
        if change.number not in self._changes:
            done = asyncio.get_running_loop().create_future()
            weights.ask(change, in_flight, done.set_result)
            self._changes = {change.number: done}
            self._work.set()
        return await asyncio.shield(self._changes[change.number])

    async def ask_trainer(self, order: TrainerOrder) -> Received:
        """Have the ranks carry out an order, between two rounds."""
        if self.failure:
            return Received(self.failure)
        if self._trainer is not None:
            return Received("another trainer order is being carried out; send one at a time")
        asked = AskedOrder(order, asyncio.get_running_loop().create_future())
        self._trainer = asked
        self._work.set()
        try:
            return await asked.done
        finally:
            self._settle(asked)

    async def listen(self, after: int, patience: float) -> tuple[int, bytes]:
        """Return the events after the issue with this number, encoded."""
        number, events = await self.bulletin.after(after, patience)
        return number, encode_events(events)

    async def load(self) -> Load:
        return self.driver.load(self.restarts.total)

    async def processes(self) -> list[Process]:
        return [own_process(ray.get_runtime_context().get_node_id()), *self._of_ranks()]

    def _of_ranks(self) -> list[Process]:
        return [place.process for place in self.workers.places] if self.workers else []

    async def stop(self, grace: float) -> None:
        for task in self._tasks:
            task.cancel()
        if self.workers is not None:
            await self.workers.close(grace)

    # The loop.

    async def _drive(self) -> None:
        try:
            while self.failure is None:
                try:
                    await self._rounds()
                except WorkersLost as lost:
                    await self._recover(str(lost))
        except Exception as error:
            log.exception("the coordinator's loop failed")
            self._give_up(f"the coordinator failed: {type(error).__name__}: {error}")

    async def _rounds(self) -> None:
        """Keep rounds in flight while there is work, and sleep while there is none."""
        assert self.workers is not None
        while True:
            while self._trainer is None and (order := self.driver.next()) is not None:
                self.workers.send(order)
            if not self.driver.unanswered and self._trainer is not None:
                await self._carry_out(self._trainer)
                continue
            if not self.driver.unanswered:
                await self._wait_for_work()
                continue
            reply = await self.workers.receive()
            self._useful = True
            self._publish(self.driver.take(reply))

    async def _carry_out(self, asked: AskedOrder) -> None:
        """Have the ranks carry out a trainer's order, while no round is in flight."""
        assert self.workers is not None
        received = Received(lost(asked.order.group))
        try:
            received = await self.workers.ask_trainer(asked.order)
        finally:
            self._settle(asked, received)

    def _settle(self, asked: AskedOrder, received: Received | None = None) -> None:
        if self._trainer is asked:
            self._trainer = None
        if received is not None and not asked.done.done():
            asked.done.set_result(received)

    async def _wait_for_work(self) -> None:
        """Sleep until there is work; raise WorkersLost as soon as a rank is lost."""
        assert self.workers is not None
        self._work.clear()
        work = asyncio.create_task(self._work.wait())
        failure = asyncio.create_task(self.workers.next_failure())
        try:
            await asyncio.wait([work, failure], return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise WorkersLost(await self.workers.reason(failure.result()))
        finally:
            work.cancel()
            failure.cancel()

    async def _expire(self) -> None:
        """End requests past their deadline, even while the ranks hang or start."""
        while True:
            await asyncio.sleep(_TICK_S)
            if late := self.driver.scheduler.expire(time.monotonic()):
                self._publish(late)
                self._work.set()

    def _publish(self, events: list[Event]) -> None:
        for event in events:
            self.bulletin.put(event)

    # Recovery.

    async def _start_workers(self) -> None:
        workers = self._make_workers(self.model, self.config, self.group)
        try:
            await workers.start()
        except BaseException:
            await workers.close()
            raise
        self.workers, self._useful, self._ready = workers, False, time.monotonic()

    async def _recover(self, reason: str) -> None:
        """Start a new worker group and resume all requests; give up if that keeps failing."""
        assert self.workers is not None
        requests = continuing(len(self.driver.scheduler.open))
        announce(self.model, f"{reason}; {requests} on a new worker group")
        await self.workers.close()
        useful = self._useful or time.monotonic() - self._ready > _USEFUL_S
        failure = await self.restarts.restart(self._start_workers, reason, useful=useful)
        if failure is not None:
            self._give_up(failure)
            return
        events = self.driver.lost()
        for event in events:
            if event.kind == Kind.POISON:
                log.error("request %d crashed the ranks repeatedly and has failed", event.uid)
        self._publish(events)

    def _give_up(self, reason: str) -> None:
        announce(self.model, reason)
        self.failure = f"{reason}; {AGAIN}"
        if self._trainer is not None:
            self._settle(self._trainer, Received(self.failure))
        ended = Event(Kind.ENDED, NO_REQUEST, reason=self.failure)
        self._publish([*self.driver.scheduler.fail_all(self.failure), ended])


CoordinatorActor = ray.remote(Coordinator)
