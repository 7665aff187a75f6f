"""A replica's engine over a coordinator that cannot always be reached."""

import asyncio
from typing import Any, cast
from unittest.mock import ANY, AsyncMock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from diffray.cluster.control.engine_client import (
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    Poisonous,
)
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import AGAIN, NO_REQUEST, Bulletin, Event, Kind, encode_events
from diffray.cluster.control.remote import RemoteEngine
from diffray.cluster.control.weight_changes import Sleep, UpdateWeights
from diffray.components.params import SamplingParams
from diffray.workers.admission import check_request
from diffray.workers.limits import Limits
from diffray.workers.messages import Change, Request, Update, WireRequest
from diffray.workers.process import Process
from tests.helpers.coroutines import until
from tests.helpers.toy import EOS, MASK, toy_spec

GONE = ActorUnavailableError("the network is gone for a moment", b"\0" * 16)


class Method:
    """A method of an actor: its calls fail as often as the test wants."""

    def __init__(self, method: Any) -> None:
        self._method = method
        self.failures = 0
        self.after = False  # it fails on its way back, when it has done its work
        self.calls = 0

    def remote(self, *args: Any) -> asyncio.Task[Any]:
        """Begin at once, as Ray does, whether or not anybody waits."""
        return asyncio.create_task(self._call(*args))

    async def _call(self, *args: Any) -> Any:
        self.calls += 1
        fails, self.failures = self.failures > 0, max(self.failures - 1, 0)
        if fails and not self.after:
            raise GONE
        found = await self._method(*args)
        if fails:
            raise GONE
        return found


class FakeCoordinator:
    """Queues what it is asked, and lets the test write the news."""

    def __init__(self) -> None:
        self.bulletin = Bulletin()
        self.asked: list[int] = []
        self.deadlines: list[float | None] = []
        self.cancelled: list[int] = []
        self.submit, self.listen = Method(self._submit), Method(self._listen)
        self.cancel, self.change = Method(self._cancel), Method(self._change)
        self.refusals = asyncio.Queue[str | Exception]()

    async def _change(self, *_: Any) -> str:
        if isinstance(found := await self.refusals.get(), Exception):
            raise found
        return found

    async def _listen(self, after: int, patience: float) -> tuple[int, bytes]:
        number, events = await self.bulletin.after(after, patience)
        return number, encode_events(events)

    async def _submit(self, request: WireRequest, *given: Any) -> None:
        self.deadlines.append(given[-1])
        if request.uid not in self.asked:
            self.asked.append(request.uid)

    async def _cancel(self, uid: int) -> None:
        self.cancelled.append(uid)

    def tell(self, uid: int, token: int, reason: str | None = None) -> None:
        update = Update(uid, [token], [0], [0.0], reason, forwards=token)
        self.bulletin.put(Event(Kind.UPDATE, uid, update))


def connected(**options: Any) -> tuple[FakeCoordinator, RemoteEngine]:
    coordinator, group = FakeCoordinator(), cast(Any, None)
    made = RemoteEngine("toy", EngineConfig(**options), group)
    made._coordinator = coordinator
    made.limits = Limits(toy_spec(), 512, 4, 100, 16, (EOS,), MASK)
    made._listener = asyncio.create_task(made._listen())
    return coordinator, made


async def moment() -> None:
    """Let the tasks that can go on do so, however busy the machine is."""
    for _ in range(20):
        await asyncio.sleep(0.001)


async def tokens(asked: RemoteEngine, uid: int, deadline: float | None = None) -> list[int]:
    found: list[int] = []
    request = Request(uid, (1, 2), SamplingParams(max_tokens=8))
    async for update in asked.submit(check_request(request, asked.limits), deadline=deadline):
        found += update.ids
    return found


async def begin(asked: RemoteEngine, uid: int) -> asyncio.Task[list[int]]:
    """Ask for an answer, and wait until the coordinator has the request."""
    answer = asyncio.create_task(tokens(asked, uid))
    await until(lambda: uid in asked._coordinator.asked)
    return answer


async def test_a_coordinator_that_is_briefly_unreachable_is_not_assumed_dead() -> None:
    coordinator, asked = connected()
    coordinator.listen.failures = coordinator.submit.failures = 2
    answer = await begin(asked, 7)
    coordinator.tell(7, 1)
    await moment()
    coordinator.listen.failures, coordinator.listen.after = 1, True  # an issue is lost
    coordinator.tell(7, 2)
    await moment()
    coordinator.tell(7, 3, "length")
    assert await answer == [1, 2, 3]
    assert asked.restarts == 0 and coordinator.submit.calls == 3
    coordinator.submit.failures, coordinator.submit.after = 1, True  # a receipt is lost
    answer = asyncio.create_task(tokens(asked, 8))
    await until(lambda: coordinator.submit.calls == 5)
    coordinator.tell(8, 1, "stop")
    assert await answer == [1] and coordinator.asked == [7, 8]


async def test_the_queue_is_bounded_while_there_is_no_coordinator() -> None:
    coordinator, asked = connected(max_queued_requests=2)
    asked._listener.cancel()  # type: ignore[union-attr]  # engine() has made one
    waiting = [asyncio.create_task(tokens(asked, uid)) for uid in range(6)]  # 4 slots
    await moment()
    with pytest.raises(Overloaded, match="6 requests"):
        await tokens(asked, 9)
    waiting[0].cancel()
    await moment()
    assert coordinator.cancelled == [0]
    later = asyncio.create_task(tokens(asked, 10))
    await moment()
    assert not later.done()
    for task in (later, *waiting):
        task.cancel()


async def test_a_finished_request_frees_its_place_before_it_is_read() -> None:
    coordinator, asked = connected(max_queued_requests=0)
    wish = SamplingParams(max_tokens=8)
    requests = [check_request(Request(uid, (1, 2), wish), asked.limits) for uid in range(4)]
    streams = [asked.submit(request) for request in requests]
    for uid, stream in enumerate(streams):
        first = asyncio.ensure_future(anext(stream))
        await moment()
        coordinator.tell(uid, 1)
        assert (await first).ids == [1]
        coordinator.tell(uid, 2, "stop")
    await moment()
    (await begin(asked, 9)).cancel()
    for stream in streams:
        assert [update.ids async for update in stream] == [[2]]
    await moment()
    assert coordinator.cancelled == [9], "a finished request is not cancelled"


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (Event(Kind.POISON, 7, reason="no"), Poisonous),
        (Event(Kind.ENDED, NO_REQUEST, reason=f"no; {AGAIN}"), EngineFailed),
    ],
)
async def test_the_reason_reaches_the_client(event: Event, kind: type[Exception]) -> None:
    coordinator, asked = connected()
    answer = await begin(asked, 7)
    coordinator.bulletin.put(event)
    with pytest.raises(kind, match="no"):
        await answer


async def test_a_deadline_holds_while_the_coordinator_says_nothing() -> None:
    coordinator, asked = connected()
    async with asyncio.timeout(60):
        with pytest.raises(DeadlineExceeded, match=r"not complete after 0\.05 s"):
            await tokens(asked, 7, deadline=0.05)
        (left,) = coordinator.deadlines  # in seconds, as its clock may be another
        assert left is not None and 0 < left <= 0.05
        coordinator.submit.failures = 10**6  # now it cannot even be reached
        with pytest.raises(DeadlineExceeded):
            await tokens(asked, 8, deadline=0.05)
    await moment()
    assert coordinator.cancelled == [7, 8]


async def test_a_cancel_that_is_lost_is_said_again() -> None:
    coordinator, asked = connected()
    coordinator.cancel.failures = 1
    answer = await begin(asked, 7)
    assert asked.ongoing_tokens == 8
    coordinator.tell(7, 1)
    await moment()
    assert asked.ongoing_tokens == 7
    answer.cancel()
    await moment()
    assert coordinator.cancelled == [] and asked.ongoing_tokens == 0
    coordinator.tell(7, 2)  # the ranks run a request that no client has
    await moment()
    assert coordinator.cancelled == [7]
    coordinator.tell(7, 3, "length")  # it had ended by itself
    await moment()
    assert coordinator.cancel.calls == 2


async def test_the_next_coordinator_gets_the_newest_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is lost before it says that it made the second update; an answer says so."""
    (first, asked), second = connected(), FakeCoordinator()
    given: list[Change | None] = []

    async def start_again() -> None:
        given.append(asked.weights.known)
        asked._coordinator = second

    monkeypatch.setattr(asked, "_start_again", start_again)
    monkeypatch.setattr(asked, "_kill_coordinator", lambda: None)
    monkeypatch.setattr(asked, "_process", Process("", 1, None))
    with pytest.raises(ValueError, match="other processes; give a folder"):
        await asked.apply(UpdateWeights({}))
    first.refusals.put_nowait("too small")
    with pytest.raises(ValueError, match="too small"):
        await asked.apply(UpdateWeights("/small"))
    assert asked.weights.known is None
    update = asyncio.create_task(asked.apply(UpdateWeights("/b", version="b")))
    answer = await begin(asked, 7)
    first.bulletin.put(Event(Kind.UPDATE, 7, Update(7, [1], forwards=1, version="b")))
    await moment()
    first.refusals.put_nowait(ActorDiedError())
    first.listen._method = AsyncMock(side_effect=ActorDiedError)
    first.bulletin.put(Event(Kind.UPDATE, 7, Update(7, [2], forwards=2, version="b")))
    await until(lambda: given)
    (known,) = given
    assert known is not None and (known.version, known.source) == ("b", "/b")
    second.refusals.put_nowait("")  # it has that change
    assert await update == "b"
    await until(lambda: second.asked)
    second.bulletin.put(Event(Kind.UPDATE, 7, Update(7, [3], [0], [0.0], "length", version="b")))
    assert (await answer)[-1] == 3
    second.refusals.put_nowait("")
    assert await asked.apply(Sleep(2)) == "b"
    assert asked.weights.known == Change(ANY, "b", "/b", level=2)
    await asked.check_health()
