"""The actor that runs one replica's diffusion loop: it queues, plans rounds, passes on news.

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

from diffray.cluster.control.engine_client import (
    NO_ROUNDS,
    EngineFailed,
    Load,
    Overloaded,
    Poisonous,
    Refusal,
    round_bucket,
)
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import AGAIN, NOBODY, Bulletin, Event, Kind
from diffray.cluster.control.heartbeat import Pulse, no_sign
from diffray.cluster.control.restarts import WITHIN_S, Restarts, not_back
from diffray.cluster.control.scheduler import Scheduler
from diffray.cluster.control.worker_group import WorkerGroup, WorkersLost, kill_here
from diffray.workers.messages import Reply, Stats, Update, WireRequest
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
        self.scheduler = Scheduler(config.max_num_seqs, 1, config.max_queued_requests)
        self.failure: str | None = None
        self.reply: Reply | None = None  # the last
        self.rounds = self.tokens = 0
        self.round_tokens = list(NO_ROUNDS)
        self.bulletin = Bulletin()
        self.restarts = Restarts(config.max_restarts)
        self._useful = False  # whether these ranks have answered anything
        self._born = 0.0
        self._pulse = Pulse("the replica", config.heartbeat_timeout_s)
        self._work = asyncio.Event()  # somebody asked for something
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
        self.scheduler = Scheduler(
            slots=facts["max_num_seqs"],
            pages=facts["num_pages"],
            max_waiting=self.config.max_queued_requests,
            check_every=self.config.check_every,
            time_slice=self.config.time_slice,
        )
        self._tasks += [asyncio.create_task(self._drive()), asyncio.create_task(self._expire())]
        return facts

    async def submit(
        self,
        request: WireRequest,
        pages: tuple[int, int],
        priority: int,
        deadline: float | None,
    ) -> Refusal | None:
        """Queue a request, which takes so many pages first and last."""
        if self.failure:
            return Refusal(EngineFailed, self.failure)
        away = self.restarts.overdue(time.monotonic())
        if away and not self.scheduler.knows(request.uid):
            return Refusal(EngineFailed, not_back("the ranks", away))
        end = None if deadline is None else time.monotonic() + deadline
        first, most = pages
        try:
            self.scheduler.submit(request, first, priority, end, most)
        except (Overloaded, Poisonous) as error:
            return Refusal(type(error), str(error))
        self._work.set()
        return None

    async def cancel(self, uid: int) -> None:
        self.scheduler.cancel(uid)
        self._work.set()

    async def listen(self, after: int, patience: float) -> tuple[int, list[Event]]:
        """Return what happened after the news of this number, all requests' together."""
        return await self.bulletin.after(after, patience)

    async def load(self) -> Load:
        """Say how busy the engine is; answers at once, whatever the ranks do."""
        scheduler, reply = self.scheduler, self.reply
        stats = reply.stats if reply else Stats(free_pages=scheduler.pages)
        return Load(
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            free_pages=stats.free_pages,
            num_pages=scheduler.pages,
            preemptions=stats.preemptions,
            forwards=stats.forwards,
            worked=reply.worked if reply else 0.0,
            waited=reply.waited if reply else 0.0,
            rounds=self.rounds,
            tokens=self.tokens,
            round_tokens=tuple(self.round_tokens),
            restarts=self.restarts.total,
        )

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
        flying, fresh = 0, True
        while True:
            while flying < self.config.rounds_in_flight:
                message = self.scheduler.plan(self.config.steps_per_round)
                if message is None:
                    break
                message.fresh = fresh
                self.workers.send(message)
                self._note_admitted(message.add)
                flying, fresh = flying + 1, False
            if not flying:
                await self._wait_for_work()
                fresh = True
                continue
            reply = await self.workers.receive()
            flying -= 1
            self.rounds, self._useful = self.rounds + 1, True
            self.reply = reply
            self._note_round(reply.updates)
            self._tell(self.scheduler.settle(reply))

    def _note_admitted(self, requests: list[WireRequest]) -> None:
        now = time.monotonic()
        for request in requests:
            self.scheduler.running[request.uid].admitted = now

    def _note_round(self, updates: list[Update]) -> None:
        """Count a round's tokens, and say with a request's first news how long it has run."""
        tokens = sum(len(update.ids) for update in updates)
        self.tokens += tokens
        self.round_tokens[round_bucket(tokens)] += 1
        for update in updates:
            queued = self.scheduler.running.get(update.uid)
            if queued is not None and queued.admitted is not None:
                update.ran = time.monotonic() - queued.admitted
                queued.admitted = None

    async def _wait_for_work(self) -> None:
        """Sleep until there is work or a rank is lost, which must not wait for the next request."""
        assert self.workers is not None
        self._work.clear()
        work = asyncio.create_task(self._work.wait())
        word = asyncio.create_task(self.workers.word())
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

    def _tell(self, news: list[Event]) -> None:
        for event in news:
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
            news = self.scheduler.restart()
            for event in news:
                if event.kind == Kind.POISON:
                    log.error("request %d ended the ranks twice and has failed", event.uid)
            self._tell(news)
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
