"""The actor that runs one replica's diffusion loop over its worker group.

It holds integers only and imports no torch. Its event loop never waits for the ranks: a round is in
flight while the next one is planned.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from diffray.cluster.control.driver import Driver
from diffray.cluster.control.engine_client import (
    EngineFailed,
    Load,
    Overloaded,
    Poisonous,
    Refusal,
)
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import AGAIN, NOBODY, Bulletin, Event, Kind
from diffray.cluster.control.heartbeat import Pulse, no_sign
from diffray.cluster.control.restarts import WITHIN_S, Restarts, not_back
from diffray.cluster.control.scheduler import Scheduler
from diffray.cluster.control.wire import encode_events
from diffray.cluster.control.worker_group import WorkerGroup, WorkersLost, kill_here
from diffray.workers.messages import Footprint, WireRequest
from diffray.workers.process import Place, own_place

log = logging.getLogger(__name__)

_TICK_S = 0.1  # between looks at deadlines
_LIVED_S = 30.0  # a worker group that was idle for so long was of use too


class Coordinator:
    """Supervises a worker group of ranks, and feeds it; kills a replica that hangs."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        group: PlacementGroup,
        replica: Place | None = None,
        *,
        make_workers: Callable[[str, EngineConfig, PlacementGroup], WorkerGroup] = WorkerGroup,
    ) -> None:
        self.model, self.config, self.group = model, config, group
        self.replica = replica
        self._make_workers = make_workers
        self.workers: WorkerGroup | None = None
        self.driver = self._new_driver({"max_num_seqs": config.max_num_seqs, "num_pages": 1})
        self.failure: str | None = None
        self.bulletin = Bulletin()
        self.restarts = Restarts(config.max_restarts)
        self._useful = False  # whether these ranks have answered anything
        self._born = 0.0
        self._pulse = Pulse("the replica", config.heartbeat_timeout_s)
        self._work = asyncio.Event()  # a request arrived or left
        self._tasks: list[asyncio.Task[None]] = []

    # What the replica calls.

    async def start(self) -> dict[str, Any]:
        """Start the ranks; returns the facts about their engine."""
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        if self.replica is not None:
            self._tasks = [asyncio.create_task(self._end_hung(self.replica))]
        begin = time.monotonic()
        self.workers = await self._new_workers()
        self.restarts.started(time.monotonic() - begin)
        facts = self.workers.facts
        self.driver = self._new_driver(facts)
        self._tasks += [asyncio.create_task(self._drive()), asyncio.create_task(self._expire())]
        return facts

    def _new_driver(self, facts: dict[str, Any]) -> Driver:
        scheduler = Scheduler(
            slots=facts["max_num_seqs"],
            pages=facts["num_pages"],
            max_waiting=self.config.max_queued_requests,
            check_every=self.config.check_every,
            time_slice=self.config.time_slice,
            page_size=self.config.page_size,
        )
        return Driver(scheduler, self.config.steps_per_round, self.config.rounds_in_flight)

    @property
    def scheduler(self) -> Scheduler:
        return self.driver.scheduler

    async def submit(
        self,
        request: WireRequest,
        footprint: Footprint,
        priority: int,
        deadline: float | None,
    ) -> Refusal | None:
        """Queue a request, or say why not; `deadline` is in seconds from now."""
        if self.failure:
            return Refusal(EngineFailed, self.failure)
        away = self.restarts.overdue(time.monotonic())
        if away and not self.scheduler.knows(request.uid):
            return Refusal(EngineFailed, not_back("the ranks", away))
        end = None if deadline is None else time.monotonic() + deadline
        try:
            self.scheduler.submit(request, footprint, priority, end)
        except (Overloaded, Poisonous) as error:
            return Refusal(type(error), str(error))
        self._work.set()
        return None

    async def cancel(self, uid: int) -> None:
        self.scheduler.cancel(uid)
        self._work.set()

    async def listen(self, after: int, patience: float) -> tuple[int, bytes]:
        """Return the events that follow the issue of this number, encoded in one piece."""
        number, events = await self.bulletin.after(after, patience)
        return number, encode_events(events)

    async def load(self) -> Load:
        """Say how busy the engine is; answers at once, whatever the ranks do."""
        return self.driver.load(self.restarts.total)

    async def place(self) -> Place:
        """Say where this process runs."""
        return own_place(ray.get_runtime_context().get_node_id())

    async def beat(self) -> None:
        """Hear that the replica lives."""
        self._pulse.beat()

    async def pids(self) -> list[int]:
        """Return the ranks' processes."""
        return [place["pid"] for place in self.workers.places] if self.workers else []

    async def stop(self, grace: float) -> None:
        """End the ranks."""
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
            while (order := self.driver.next()) is not None:
                self.workers.send(order)
            if not self.driver.flying:
                await self._wait_for_work()
                continue
            reply = await self.workers.receive()
            self._useful = True
            self._tell(self.driver.take(reply))

    async def _wait_for_work(self) -> None:
        """Sleep until there is work or a rank is lost, which must not wait for the next request."""
        assert self.workers is not None
        self._work.clear()
        work = asyncio.create_task(self._work.wait())
        word = asyncio.create_task(self.workers.next_failure())
        try:
            await asyncio.wait([work, word], return_when=asyncio.FIRST_COMPLETED)
            if word.done():
                raise WorkersLost(await self.workers.reason(word.result()))
        finally:
            work.cancel()
            word.cancel()

    async def _expire(self) -> None:
        """End what is late, even while the ranks are hung or being started."""
        while True:
            await asyncio.sleep(_TICK_S)
            if late := self.scheduler.expire(time.monotonic()):
                self._tell(late)
                self._work.set()

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            self.bulletin.put(event)

    # Recovery.

    async def _new_workers(self) -> WorkerGroup:
        workers = self._make_workers(self.model, self.config, self.group)
        try:
            await workers.start()
        except BaseException:
            await workers.close()
            raise
        self._useful, self._born = False, time.monotonic()
        return workers

    async def _recover(self, reason: str) -> None:
        """Start the ranks anew and let every request go on; give up where that is of no use."""
        assert self.workers is not None
        log.error("the ranks are lost: %s", reason)
        await self.workers.close()
        useful = self._useful or time.monotonic() - self._born > _LIVED_S
        while True:
            pause = self.restarts.pause(time.monotonic(), useful=useful)
            if pause is None:
                self._give_up(
                    f"the ranks were lost {self.restarts.lately + 1} times within "
                    f"{WITHIN_S / 60:g} minutes (max_restarts); the last time: {reason}"
                )
                return
            await asyncio.sleep(pause)
            begin = time.monotonic()
            try:
                self.workers = await self._new_workers()
            except WorkersLost as lost:
                reason, useful = str(lost), False
                log.error("the ranks could not be started again: %s", reason)
                continue
            self.restarts.started(time.monotonic() - begin)
            events = self.driver.lost()
            for event in events:
                if event.kind == Kind.POISON:
                    log.error("request %d ended the ranks twice and has failed", event.uid)
            self._tell(events)
            return

    async def _end_hung(self, replica: Place) -> None:
        """Kill the replica if it hangs, for then Serve starts another; and this with its ranks.

        As long as the process is there, its connections are open, and its clients wait for nothing.
        """
        await self._pulse.stops()
        name = f"the replica (process {replica['pid']})"
        log.error("%s; it is killed", no_sign(name, self.config.heartbeat_timeout_s))
        kill_here([replica, *(self.workers.places if self.workers else [])])
        os._exit(1)

    def _give_up(self, reason: str) -> None:
        self.failure = f"{reason}; {AGAIN}"
        ended = Event(Kind.ENDED, NOBODY, reason=self.failure)
        self._tell([*self.scheduler.fail_all(self.failure), ended])


CoordinatorActor = ray.remote(Coordinator)
