"""The actor that runs one replica's diffusion loop: it queues, plans rounds, passes on news.

It holds integers only and imports no torch. Its event loop never waits for the ranks: a round is in
flight while the next one is planned.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from diffray.cluster.client import Overloaded
from diffray.cluster.config import EngineConfig
from diffray.cluster.gang import Gang, GangLost
from diffray.cluster.scheduler import Scheduler

log = logging.getLogger(__name__)

STORM_S = 600.0  # restarts are counted over so long
ENDED = "ended"  # news: the coordinator gives up, and says why


class Coordinator:
    """Supervises a gang of ranks, and feeds it."""

    def __init__(self, model: str, config: EngineConfig, group: PlacementGroup) -> None:
        self.model, self.config, self.group = model, config, group
        self.gang: Gang | None = None
        self.scheduler = Scheduler(config.max_num_seqs, 1, config.max_queued_requests)
        self.failure: str | None = None
        self.stats: dict[str, float] = {}
        self.rounds = 0
        self._restarts: deque[float] = deque()
        self._restarted = 0
        self._work = asyncio.Event()  # somebody asked for something
        self._news: list[list[Any]] = []
        self._told = asyncio.Event()  # there is news
        self._loop: asyncio.Task[None] | None = None

    # What the replica calls.

    async def start(self) -> dict[str, Any]:
        """Start the ranks; returns the facts about their engine."""
        logging.basicConfig(level=logging.INFO)
        self.gang = await self._new_gang()
        facts = self.gang.facts
        self.scheduler = Scheduler(
            slots=facts["max_num_seqs"],
            pages=facts["num_pages"],
            max_waiting=self.config.max_queued_requests,
            check_every=self.config.check_every,
        )
        self._loop = asyncio.create_task(self._drive())
        return facts

    async def submit(
        self, packed: dict[str, Any], pages: int, priority: int, deadline: float | None
    ) -> list[str] | None:
        """Queue a request; returns what kind of refusal it is and why, if so."""
        if self.failure:
            return ["failed", self.failure]
        end = None if deadline is None else time.monotonic() + deadline
        try:
            self.scheduler.submit(packed, pages, priority, end)
        except Overloaded as error:
            return ["full", str(error)]
        self._work.set()
        return None

    async def cancel(self, uid: int) -> None:
        self.scheduler.cancel(uid)
        self._work.set()

    async def news(self) -> AsyncIterator[list[list[Any]]]:
        """Yield what happened, all requests' news of a round together."""
        while True:
            await self._told.wait()
            self._told.clear()
            news, self._news = self._news, []
            yield news

    async def load(self) -> dict[str, Any]:
        """Say how busy the engine is; answers at once, whatever the ranks do."""
        scheduler = self.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": scheduler.waiting,
            "queued_tokens": scheduler.queued_tokens,
            "free_pages": self.stats.get("free_pages", scheduler.pages),
            "num_pages": scheduler.pages,
            "preemptions": self.stats.get("preemptions", 0),
            "forwards": self.stats.get("forwards", 0),
            "tokens": self.stats.get("tokens", 0),
            "worked": self.stats.get("worked", 0.0),
            "waited": self.stats.get("waited", 0.0),
            "rounds": self.rounds,
            "restarts": self._restarted,
            "failure": self.failure,
        }

    async def pid(self) -> int:
        return os.getpid()

    async def pids(self) -> list[int]:
        """Return the ranks' processes."""
        return [place["pid"] for place in self.gang.places] if self.gang else []

    async def stop(self, grace: float) -> None:
        """End the ranks."""
        if self._loop is not None:
            self._loop.cancel()
        if self.gang is not None:
            await self.gang.close(grace)

    # The loop.

    async def _drive(self) -> None:
        try:
            while self.failure is None:
                try:
                    await self._rounds()
                except GangLost as lost:
                    await self._recover(str(lost))
        except Exception as error:
            log.exception("the coordinator's loop failed")
            self._give_up(f"the coordinator failed: {type(error).__name__}: {error}")

    async def _rounds(self) -> None:
        """Keep rounds in flight while there is work, and sleep while there is none."""
        assert self.gang is not None
        flying, fresh = 0, True
        while True:
            self._tell(self.scheduler.expire(time.monotonic()))
            while flying < self.config.rounds_in_flight:
                message = self.scheduler.plan(self.config.steps_per_round)
                if message is None:
                    break
                self.gang.send(message | {"fresh": fresh})
                flying, fresh = flying + 1, False
            if not flying:
                await self._wait_for_work()
                fresh = True
                continue
            reply = await self.gang.receive()
            flying -= 1
            self.rounds += 1
            self.stats = reply["stats"]
            self._tell(self.scheduler.settle(reply))

    async def _wait_for_work(self) -> None:
        """Sleep until there is work or a rank is lost, which must not wait for the next request."""
        assert self.gang is not None
        self._work.clear()
        work = asyncio.create_task(self._work.wait())
        lost = asyncio.create_task(self.gang.lost())
        try:
            await asyncio.wait([work, lost], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise GangLost(lost.result())
        finally:
            work.cancel()
            lost.cancel()

    def _tell(self, news: list[list[Any]]) -> None:
        if news:
            self._news += news
            self._told.set()

    # Recovery.

    async def _new_gang(self) -> Gang:
        gang = Gang(self.model, self.config, self.group)
        try:
            await gang.start()
        except BaseException:
            await gang.close()
            raise
        return gang

    async def _recover(self, reason: str) -> None:
        """Start the ranks anew and let every request go on; give up where that is of no use."""
        assert self.gang is not None
        log.error("the ranks are lost: %s", reason)
        await self.gang.close()
        while True:
            now = time.monotonic()
            while self._restarts and self._restarts[0] < now - STORM_S:
                self._restarts.popleft()
            if len(self._restarts) >= self.config.max_restarts:
                self._give_up(
                    f"the ranks were lost {len(self._restarts) + 1} times within "
                    f"{STORM_S / 60:g} minutes (max_restarts); the last time: {reason}"
                )
                return
            await asyncio.sleep(min(2.0 ** len(self._restarts) - 1, 30.0))
            self._restarts.append(now)
            self._restarted += 1
            try:
                self.gang = await self._new_gang()
            except GangLost as lost:
                reason = str(lost)
                log.error("the ranks could not be started again: %s", reason)
                continue
            self.scheduler.restart()
            return

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._tell([*self.scheduler.fail_all(reason), [ENDED, reason]])


CoordinatorActor = ray.remote(Coordinator)
