"""The coordinator over ranks of its own making: what it does when they die, hang or start badly."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from diffray.cluster.control import actors
from diffray.cluster.control.coordinator import Coordinator
from diffray.cluster.control.engine_client import EngineFailed, Poisonous, Refusal
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import Event, Kind, decode_events
from diffray.cluster.control.rank_channel import Failure
from diffray.cluster.control.weight_changes import LOST, InFlight
from diffray.cluster.control.worker_group import WorkerGroup, WorkersLost
from diffray.components.model_spec import ModelSpec
from diffray.workers.limits import Limits
from diffray.workers.messages import Change, Footprint, RankPlace, Reply, Round, WireRequest
from tests.helpers.coroutines import until
from tests.helpers.fake_ranks import FakeRanks, Lost, asked, ids_of

ONE = Footprint(1, 1)


class FakeGang:
    """Ranks in this process: each reply takes a moment, and some worker groups die."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.ranks = FakeRanks(
            4, 40, need=world.need, poison=world.poison, refusals=world.refusals, wrote=world.wrote
        )
        spec = ModelSpec(1, 1, 8, 8, 32, 0, 128, block_causal=False)
        self.limits = Limits(spec, 128, 4, 40, 16, eos_token_ids=(), mask_token_id=31)
        self.places: list[RankPlace] = []
        self._sent: deque[Any] = deque()
        self._dead = asyncio.Event()

    async def start(self) -> None:
        self.world.starts.append(time.monotonic())
        await self.world.loads.wait()
        if self.world.broken:
            raise WorkersLost("no device")

    def send(self, order: Round[Any] | None) -> None:
        self._sent.append(order)

    async def receive(self) -> Reply:
        await asyncio.sleep(0.001)
        if self._dead.is_set():
            raise WorkersLost("killed")
        try:
            return self.ranks.step(self._sent.popleft())
        except Lost:
            raise WorkersLost("it died of a request") from None

    async def next_failure(self) -> None:
        await self._dead.wait()

    async def reason(self, message: None) -> str:
        return "killed"

    def kill(self) -> None:
        self._dead.set()

    async def close(self, grace: float = 0.0) -> None:
        pass


class World(Coordinator):
    """A coordinator, what happens to its worker groups, and the news that came of it."""

    def __init__(self, **options: Any) -> None:
        self.starts: list[float] = []
        self.loads, self.broken = asyncio.Event(), False
        self.loads.set()
        self.need: dict[int, int] = {}
        self.poison: dict[int, int] = {}
        self.refusals: list[str] = []  # of new weights
        self.wrote: dict[int, list[str]] = {}  # on which weights, by request
        self.news: list[Event] = []
        group: Any = None
        super().__init__("toy", EngineConfig(**options), group, make_workers=self.make)

    def make(self, *_: Any) -> Any:
        return FakeGang(self)

    @property
    def gang(self) -> FakeGang:
        assert isinstance(self.workers, FakeGang)
        return self.workers

    async def ask(self, uid: int, max_tokens: int, deadline: float | None = None) -> None:
        assert await self.submit(asked(uid, max_tokens), ONE, 0, deadline) is None

    async def some_rounds(self) -> None:
        """Wait until these ranks have answered a few rounds."""
        enough = self.driver.rounds + 8
        await until(lambda: self.driver.rounds >= enough)

    def refuse(self, *reasons: str) -> None:
        """Refuse the next changes of weights, in this worker group and the next ones."""
        self.refusals = self.gang.ranks.refusals = [*reasons]

    async def finished(self, *uids: int) -> None:
        """Wait until these requests have had their last event."""
        number = 0
        async with asyncio.timeout(60):
            while not {event.uid for event in self.news if event.ends} >= {*uids}:
                number, events = await self.listen(number, 0.1)
                self.news += decode_events(events)

    def tokens(self, uid: int) -> list[int]:
        return ids_of(uid, self.news)


@asynccontextmanager
async def world_of(**options: Any) -> AsyncIterator[World]:
    world = World(**options)
    await world.start()
    try:
        yield world
    finally:
        await world.stop(0)


async def test_losses_cost_no_token_and_no_backoff_while_the_ranks_work() -> None:
    """And a loss while nothing runs is mended before the next request comes."""
    async with world_of() as world:
        for uid in range(6):
            await world.ask(uid, 60)
        for _ in range(4):
            await world.some_rounds()
            world.gang.kill()
        await world.finished(*range(6))
        assert all(world.tokens(uid) == list(range(1, 61)) for uid in range(6))
        assert len(world.starts) == 5
        world.gang.kill()
        await until(lambda: len(world.starts) == 6)
        await world.ask(6, 3)
        await world.finished(6)
        assert (await world.load()).restarts == 5


async def test_the_request_that_ends_the_ranks_fails_and_the_others_do_not() -> None:
    async with world_of() as world:
        world.poison[2] = 0
        for uid in range(5):
            await world.ask(uid, 60)
        await world.finished(*range(5))
        assert [event.uid for event in world.news if event.kind == Kind.POISON] == [2]
        assert all(world.tokens(uid) == list(range(1, 61)) for uid in (0, 1, 3, 4))
        refusal = await world.submit(asked(9, 60, like=2), ONE, 0, None)
        assert refusal is not None and refusal.error is Poisonous


async def test_deadlines_hold_while_the_ranks_are_being_started() -> None:
    async with world_of() as world:
        await world.ask(0, 10_000, deadline=0.3)
        await world.some_rounds()
        world.loads.clear()
        world.gang.kill()
        await world.finished(0)
        assert world.news[-1] == Event(Kind.LATE, 0)


async def test_ranks_that_cannot_be_started_again_are_given_up_with_a_reason() -> None:
    async with world_of(max_restarts=2) as world:
        await world.ask(0, 10_000)
        await world.some_rounds()
        world.broken = True
        world.gang.kill()
        await world.finished(0)
        failed, ended = (event for event in world.news if event.update is None)
        reason = failed.reason
        assert (failed.kind, ended.kind) == (Kind.FAILED, Kind.ENDED)
        assert "3 times" in reason and "no device" in reason
        refusal = await world.submit(asked(1), ONE, 0, None)
        assert refusal == Refusal(EngineFailed, reason)


async def test_what_is_new_is_refused_while_a_restart_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world_of() as world:
        await world.ask(0, 400)
        await world.some_rounds()
        world.loads.clear()
        world.gang.kill()
        await until(lambda: len(world.starts) == 2)
        await world.ask(1, 3)
        monkeypatch.setattr(actors, "_SHORTEST_START_S", 0.0)
        await until(lambda: bool(world.restarts.overdue(time.monotonic())))
        refusal = await world.submit(asked(2), ONE, 0, None)
        assert refusal is not None and refusal.error is EngineFailed
        assert "not be restarted" in refusal.reason
        await world.ask(1, 3)  # it is known already
        world.loads.set()
        await world.finished(0, 1)
        assert len(world.tokens(0)) == 400
        await world.ask(2, 3)


async def test_a_loss_is_not_forgotten_for_a_request_that_comes_meanwhile() -> None:
    """After a rank reports its failure, its death is awaited for a moment: it explains more."""
    config, group = EngineConfig(), cast(Any, None)
    coordinator = Coordinator("toy", config, group)
    coordinator.workers = workers = WorkerGroup("toy", config, group)
    idle = asyncio.create_task(coordinator._wait_for_work())
    await asyncio.sleep(0.01)
    workers.channel.messages.put_nowait(Failure("rank 0: no memory", dead=False))
    await asyncio.sleep(0.01)
    coordinator._work.set()
    with pytest.raises(WorkersLost, match="rank 0: no memory"):
        await idle


async def test_pages_of_a_prefix_that_a_running_request_has_are_counted_once() -> None:
    """Of 40 pages the first takes 35, 30 of them for the prompt, and each other one 5."""
    async with world_of(page_size=2) as world:
        world.need |= {0: 35, 1: 5, 2: 5}
        for uid in range(3):
            request = WireRequest(uid, (1,) * 60, {"max_tokens": 10**6})
            assert await world.submit(request, Footprint(35, 35, 2), 0, None) is None
        await world.some_rounds()
        load = await world.load()
        assert (load.running, load.waiting) == (2, 1)


# New weights.


@pytest.mark.parametrize("mode", ["finish", "restart"])
async def test_a_new_worker_group_gets_the_newest_weights(mode: InFlight) -> None:
    """The second group dies too, and while it dies requests of both kinds are under way."""
    async with world_of() as world:
        await world.ask(1, 40)
        await world.some_rounds()
        change = asyncio.create_task(world.change(Change(1, "a", "/a"), mode))
        await asyncio.sleep(0)
        await world.ask(2, 60)
        assert await change == ""
        for _ in range(2):
            await world.some_rounds()
            world.gang.kill()
            await until(lambda: world.gang.ranks.version == "a" and len(world.starts) > 1)
        await world.finished(1, 2)
        versions = {event.uid: event.update.version for event in world.news if event.update}
        assert versions == {1: "0", 2: "a"}
        assert {*world.wrote[1]} == {"0"} and {*world.wrote[2]} == {"a"}
        assert world.tokens(2) == list(range(1, 61))
        load = await world.load()
        assert (load.weights_version, load.weight_updates) == ("a", 1)


async def test_weights_that_were_lost_with_their_ranks_are_refused() -> None:
    async with world_of() as world:
        await world.ask(1, 30)
        await world.some_rounds()
        change = asyncio.create_task(world.change(Change(1, "a", "/a"), "finish"))
        await asyncio.sleep(0)
        world.gang.kill()  # while it waits for the request, which goes on
        assert await change == ""
        assert {*world.wrote[1]} == {"0"} and len(world.tokens(1)) == 0
        world.refuse("of another shape")
        assert await world.change(Change(2, "b", "/b"), "finish") == "of another shape"
        sent = world.gang.send

        def die(order: Any) -> None:
            sent(order)
            world.gang.kill()

        world.gang.send = die  # type: ignore[method-assign]
        assert await world.change(Change(3, "c", "/c"), "finish") == LOST
        assert (await world.load()).weights_version == "a"
        await world.ask(2, 3)
        await world.finished(1, 2)
        assert {*world.wrote[2]} == {"a"}


async def test_ranks_lost_asleep_come_back_asleep() -> None:
    async with world_of() as world:
        await world.ask(1, 10)
        await world.some_rounds()
        assert await world.change(Change(1, "a", "/a"), "finish") == ""
        assert await world.change(Change(2, level=2), "finish") == ""
        assert len(world.wrote[1]) == 10, "what has begun ends first"
        await world.ask(2, 5)
        for _ in range(2):
            world.gang.kill()
            world.gang.ranks.level = 0
            await until(lambda: world.gang.ranks.level > 0)
        assert world.gang.ranks.version == "a" and 2 not in world.wrote
        load = await world.load()
        assert (load.sleep_level, load.waiting, load.weight_updates) == (2, 1, 1)
        world.refuse("there is no folder")
        assert await world.change(Change(3, level=0), "finish") == "there is no folder"
        assert (await world.load()).sleep_level == 2
        assert await world.change(Change(4, level=0), "finish") == ""
        await world.finished(2)
        assert {*world.wrote[2]} == {"a"}
        assert (await world.load()).sleep_level == 0


async def test_asked_again_weights_are_read_once() -> None:
    async with world_of() as world:
        change = Change(1, "a", "/a")
        asked = [asyncio.create_task(world.change(change, "finish")) for _ in range(3)]
        await asyncio.sleep(0)
        asked[0].cancel()  # who leaves takes the change from nobody
        assert await asyncio.gather(*asked[1:]) == ["", ""]
        assert asked[0].cancelled()
        assert await world.change(change, "finish") == ""
        assert (await world.load()).weight_updates == 1


async def test_a_new_coordinator_begins_with_the_weights_and_sleep_it_is_given() -> None:
    async with world_of() as world:
        group: Any = None
        weights = Change(7, "g", "/g", level=2)
        other = Coordinator("toy", world.config, group, weights, make_workers=world.make)
        await other.start()
        assert await other.submit(asked(5, 3), ONE, 0, None) is None
        await until(lambda: isinstance(other.workers, FakeGang) and other.workers.ranks.level > 0)
        assert (await other.load()).sleep_level == 2 and 5 not in world.wrote
        assert await other.change(Change(8, level=0), "finish") == ""
        await until(lambda: 5 in world.wrote)
        assert {*world.wrote[5]} == {"g"}
        await other.stop(0)
