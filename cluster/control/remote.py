"""A replica's engine behind its coordinator: what the HTTP layer submits requests to.

It keeps of every open request what was asked and what has come, so a coordinator that dies costs
a pause and no answer.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from diffray.cluster.control.actor_names import actor_name
from diffray.cluster.control.coordinator import CoordinatorActor
from diffray.cluster.control.engine_client import (
    EngineFailed,
    Load,
    Overloaded,
    Refusal,
)
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import (
    AGAIN,
    Event,
    Kind,
    Mailbox,
    too_late,
    updates_from,
)
from diffray.cluster.control.heartbeat import answered
from diffray.cluster.control.queued_request import QueuedRequest
from diffray.cluster.control.restarts import WITHIN_S, Restarts, not_back
from diffray.cluster.control.wire import decode_events
from diffray.cluster.control.worker_group import first_line, kill_here
from diffray.components.model import ModelSpec
from diffray.workers.admission import CheckedRequest, Limits
from diffray.workers.messages import Update
from diffray.workers.process import Place, own_place

log = logging.getLogger(__name__)

_ANSWER_S = 10.0  # a coordinator answers at once, whatever its ranks do
_BORN_S = 120.0  # a new process may need so long to say where it is
_USEFUL_S = 1.0  # a coordinator that lived for so long was of use
_BLIP_S = 0.2  # before a coordinator is asked again that could not be reached

T = TypeVar("T")


@dataclass(slots=True)
class _Open:
    """A request that is waited for."""

    queued: QueuedRequest
    mailbox: Mailbox = field(default_factory=Mailbox)


class RemoteEngine:
    """An EngineClient; `start` makes one."""

    def __init__(self, model: str, config: EngineConfig, group: PlacementGroup) -> None:
        self.model, self.config, self.group = model, config, group
        self.failure: str | None = None
        self.revivals = Restarts(config.max_restarts)
        self._ready = 0.0  # when the coordinator was ready
        self._open: dict[int, _Open] = {}
        self._coordinator: Any = None
        self._places: list[Place] = []  # of the coordinator, once it has a process
        self._closed = threading.Event()
        self._listener: asyncio.Task[None] | None = None
        self._owns_group = False
        self._limits: Limits | None = None

    @classmethod
    async def start(
        cls, model: str, config: EngineConfig, bundles: list[dict[str, float]] | None = None
    ) -> Self:
        """Start a coordinator and its ranks: in the current placement group, or in `bundles`."""
        group = ray.util.get_current_placement_group() if bundles is None else None
        if group is None:
            if bundles is None:
                raise ValueError("outside a placement group, say which bundles to reserve")
            group = placement_group(bundles, strategy="PACK")
            await group.ready()
        engine = cls(model, config, group)
        engine._owns_group = bundles is not None
        threading.Thread(target=engine._beat, name="heartbeat", daemon=True).start()
        try:
            await engine._begin()
        except BaseException:
            await engine.close(grace=0)
            raise
        engine._listener = asyncio.create_task(engine._listen())
        return engine

    @property
    def restarts(self) -> int:
        """How often the coordinator was started again."""
        return self.revivals.total

    @property
    def limits(self) -> Limits:
        assert self._limits is not None, "start() makes an engine"
        return self._limits

    async def submit(
        self, request: CheckedRequest, *, priority: int = 0, deadline: float | None = None
    ) -> AsyncGenerator[Update, None]:
        """Yield a request's updates; see EngineClient."""
        if self.failure:
            raise EngineFailed(self.failure)
        if away := self.revivals.overdue(time.monotonic()):
            raise EngineFailed(not_back("coordinator and ranks", away))
        # The coordinator's own bound, for while there is none.
        if len(self._open) >= self.limits.max_num_seqs + self.config.max_queued_requests:
            raise Overloaded(
                f"the queue is full ({len(self._open)} requests are running or waiting); "
                "try again later"
            )
        wire, loop = request.request.to_wire(), asyncio.get_running_loop()
        end = None if deadline is None else loop.time() + deadline
        mine = _Open(QueuedRequest(wire, request.footprint, priority, end, number=0))
        self._open[request.uid] = mine
        try:
            try:
                async with asyncio.timeout_at(end):
                    await self._hand_over(mine.queued)
            except TimeoutError:
                raise too_late(deadline) from None
            async with aclosing(updates_from(mine.mailbox, deadline, end)) as updates:
                async for update in updates:
                    yield update
        finally:
            if self._open.pop(request.uid, None) is not None:  # it has not ended
                self._coordinator.cancel.remote(request.uid)

    async def load(self) -> Load:
        try:
            load: Load = await asyncio.wait_for(self._coordinator.load.remote(), _ANSWER_S)
        except (RayError, TimeoutError) as error:
            raise EngineFailed(f"the coordinator does not answer: {first_line(error)}") from None
        return load

    @property
    def queued_tokens(self) -> int:
        """Tokens asked for and not yet there: what autoscaling looks at."""
        return sum(mine.queued.missing for mine in self._open.values())

    async def pids(self) -> list[int]:
        """The ranks' processes, each on its own node."""
        pids: list[int] = await self._coordinator.pids.remote()
        return pids

    async def coordinator_pid(self) -> int:
        place = await self._coordinator.place.remote()
        return int(place["pid"])

    async def check_health(self) -> None:
        """Raise EngineFailed if no request can be answered, now and later."""
        if self.failure:
            raise EngineFailed(self.failure)
        if self._listener is None or self._listener.done():
            raise EngineFailed("nobody listens to the coordinator any more")

    async def close(self, grace: float = 10.0) -> None:
        """End the coordinator and its ranks, and free what they reserved."""
        if self._listener is not None:
            self._listener.cancel()
        if self._coordinator is not None:
            try:
                async with asyncio.timeout(grace + _ANSWER_S):
                    await self._while_it_answers(self._coordinator.stop.remote(grace))
            except (RayError, TimeoutError) as error:
                log.warning("the coordinator did not stop by itself: %s", first_line(error))
                self._kill_coordinator()
            else:
                await self._let_coordinator_exit()
        self._closed.set()
        if self._owns_group:
            remove_placement_group(self.group)

    async def _let_coordinator_exit(self) -> None:
        """Wait until its process has ended: of one that is killed, Ray warns the user."""
        try:
            await asyncio.wait_for(self._coordinator.__ray_terminate__.remote(), _ANSWER_S)
        except RayActorError:
            return
        except (RayError, TimeoutError) as error:
            log.warning("the coordinator did not exit by itself: %s", first_line(error))
        self._kill_coordinator()

    def _kill_coordinator(self) -> None:
        ray.kill(self._coordinator, no_restart=True)
        kill_here(self._places)

    async def _begin(self) -> None:
        """Start a coordinator, which starts its workers."""
        begin = time.monotonic()
        # The coordinator may kill a replica, which Serve replaces, but not a driver or a test.
        node = ray.get_runtime_context().get_node_id()
        replica = None if self._owns_group else own_place(node)
        self._coordinator = CoordinatorActor.options(
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, 0),
            name=actor_name(self.model, self.group, "coordinator"),
        ).remote(self.model, self.config, self.group, replica)
        self._places = []
        try:
            self._places = [await self._coordinator_place()]
            facts = await self._while_it_answers(self._coordinator.start.remote())
        except (RayError, TimeoutError) as error:
            raise EngineFailed(f"{self.model} could not be started: {first_line(error)}") from None
        facts["eos_token_ids"] = tuple(facts["eos_token_ids"])
        self._ready = time.monotonic()
        self.revivals.started(self._ready - begin)
        self._limits = Limits(**facts | {"spec": ModelSpec(**facts["spec"])})

    async def _coordinator_place(self) -> Place:
        try:
            async with asyncio.timeout(_BORN_S):
                place: Place = await self._coordinator.place.remote()
        except TimeoutError:
            raise TimeoutError(f"its coordinator was not there after {_BORN_S:g} s") from None
        return place

    def _beat(self) -> None:
        """Tell the coordinator that this process lives; a thread, as an event loop may be busy."""
        while not self._closed.wait(self.config.heartbeat_s):
            # A call would start a Ray where there is none any more.
            if self._coordinator is not None and ray.is_initialized():
                with suppress(Exception):  # whoever waits for an answer finds out what is wrong
                    self._coordinator.beat.remote()

    async def _while_it_answers(self, call: Awaitable[T]) -> T:
        """Wait for the coordinator's answer, however long it takes, as long as it gives others."""
        waiting = asyncio.ensure_future(call)
        try:
            while not waiting.done():
                await answered(self._coordinator.place.remote(), self.config.heartbeat_timeout_s)
                await asyncio.wait([waiting], timeout=self.config.heartbeat_s)
            return await waiting
        finally:
            waiting.cancel()

    async def _hand_over(self, queued: QueuedRequest) -> None:
        """Give the coordinator a request; it takes one that it has already only once."""
        while True:
            coordinator, deadline = self._coordinator, None
            if queued.deadline is not None:
                deadline = queued.deadline - asyncio.get_running_loop().time()
            try:
                refusal: Refusal | None = await coordinator.submit.remote(
                    queued.request, queued.footprint, queued.priority, deadline
                )
                break
            except ActorUnavailableError:
                await asyncio.sleep(_BLIP_S)
                if queued.forwards or coordinator is not self._coordinator:
                    return  # it was heard
            except RayActorError:
                return  # whoever revives the coordinator hands over all that is open
        if refusal is not None:
            raise refusal.error(refusal.reason)

    async def _listen(self) -> None:
        """Pass on the coordinator's news, and replace it if it dies or says nothing any more."""
        number, heard = 0, time.monotonic()
        while self.failure is None:
            try:
                call = self._coordinator.listen.remote(number, self.config.heartbeat_s)
                number, events = await answered(call, self.config.heartbeat_timeout_s)
                heard = time.monotonic()
                for event in decode_events(events):
                    self._take(event)
                continue
            except ActorUnavailableError as error:
                reason = first_line(error)
                if time.monotonic() - heard < self.config.heartbeat_timeout_s:
                    await asyncio.sleep(_BLIP_S)
                    continue
            except (TimeoutError, RayActorError) as error:
                reason = first_line(error)
            except Exception as error:
                self._fail(f"the coordinator's news cannot be read: {error}; {AGAIN}")
                return
            await self._revive(reason)
            number, heard = 0, time.monotonic()

    def _take(self, event: Event) -> None:
        if event.kind == Kind.ENDED:
            self._fail(event.reason)
            return
        if (mine := self._open.get(event.uid)) is not None:
            if event.update is not None:
                mine.queued.follow(event.update)
            mine.mailbox.put(event)
            if event.ends:  # it may not be read yet, but nobody has to answer it any more
                del self._open[event.uid]
        elif not event.ends:  # its client has left, and the word of that may not have arrived
            self._coordinator.cancel.remote(event.uid)

    async def _revive(self, reason: str) -> None:
        """Start another coordinator, and hand over all that is open; give up after too many."""
        useful = time.monotonic() - self._ready > _USEFUL_S
        while True:
            log.error("the coordinator is lost: %s", reason)
            pause = self.revivals.pause(time.monotonic(), useful=useful)
            if pause is None:
                self._fail(
                    f"the coordinator was lost {self.revivals.lately + 1} times within "
                    f"{WITHIN_S / 60:g} minutes (max_restarts); the last time: {reason}; {AGAIN}"
                )
                return
            self._kill_coordinator()
            await asyncio.sleep(pause)
            try:
                await self._begin()
                break
            except EngineFailed as error:
                reason, useful = str(error), False
        for uid, mine in list(self._open.items()):
            if uid not in self._open:
                continue  # its client has left meanwhile
            mine.queued.again()
            try:
                await self._hand_over(mine.queued)
            except (EngineFailed, Overloaded) as error:
                mine.mailbox.put(Event(Kind.FAILED, uid, reason=str(error)))

    def _fail(self, reason: str) -> None:
        self.failure = reason
        for uid, mine in self._open.items():
            mine.mailbox.put(Event(Kind.FAILED, uid, reason=reason))
