"""A replica's client of its coordinator, to which the HTTP layer submits requests.

It keeps open requests and their tokens, so a coordinator's death costs a pause but no answer.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from diffray.cluster.control.actors import (
    DIED,
    Restarts,
    actor_name,
    announce,
    continuing,
    first_line,
    kill_here,
)
from diffray.cluster.control.coordinator import CoordinatorActor
from diffray.cluster.control.engine_client import EngineFailed, Load, Overloaded, Refusal
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import AGAIN, Event, Kind, OpenRequests, decode_events
from diffray.cluster.control.rank_channel import answered
from diffray.cluster.control.request_queue import QueuedRequest
from diffray.cluster.control.weight_changes import EngineChange, InFlight, RemoteWeights
from diffray.workers.limits import Limits
from diffray.workers.messages import Change, Update
from diffray.workers.process import Process
from diffray.workers.trainer_orders import Received, TrainerOrder, granted, lost

if TYPE_CHECKING:  # it imports torch
    from diffray.workers.admission import CheckedRequest

log = logging.getLogger(__name__)

_ANSWER_S = 10.0  # a coordinator answers at once, whatever its ranks do
_PROCESS_S = 120.0  # for a new coordinator's process to start
_USEFUL_S = 1.0  # a coordinator that lived this long was useful
_RETRY_S = 0.2  # before a coordinator that could not be reached is called again

T = TypeVar("T")


class RemoteEngine:
    """An EngineClient over a coordinator; `start` makes one."""

    limits: Limits

    def __init__(self, model: str, config: EngineConfig, group: PlacementGroup) -> None:
        self.model, self.config, self.group = model, config, group
        self._requests = OpenRequests()
        self._queued: dict[int, QueuedRequest] = {}  # until their clients leave
        self._restarts = Restarts("the coordinator", config.max_restarts)
        self._ready = 0.0  # when the coordinator was ready
        self._coordinator: Any = None
        self._process: Process | None = None  # the coordinator's, once it has one
        self._listener: asyncio.Task[None] | None = None
        self._owns_group = False
        self.weights = RemoteWeights()
        self._replacing = False

    @classmethod
    async def start(
        cls, model: str, config: EngineConfig, bundles: list[dict[str, float]] | None = None
    ) -> Self:
        """Start a coordinator and its ranks, in the current placement group or in new `bundles`."""
        group = ray.util.get_current_placement_group() if bundles is None else None
        if group is None:
            if bundles is None:
                raise ValueError("outside a placement group, give the bundles to reserve")
            group = placement_group(bundles, strategy="PACK")
            await group.ready()
        engine = cls(model, config, group)
        engine._owns_group = bundles is not None
        try:
            await engine._restarts.start(engine._start_coordinator)
        except BaseException:
            await engine.close(grace=0)
            raise
        engine._listener = asyncio.create_task(engine._listen())
        return engine

    @property
    def restarts(self) -> int:
        return self._restarts.total

    async def submit(
        self, request: "CheckedRequest", *, priority: int = 0, deadline: float | None = None
    ) -> AsyncGenerator[Update, None]:
        self._requests.check()
        if overdue := self._restarts.overdue(time.monotonic()):
            raise EngineFailed(overdue)
        # The coordinator has the same bound, but there may be no coordinator.
        if len(self._requests) >= self.limits.max_num_seqs + self.config.max_queued_requests:
            raise Overloaded(
                f"the queue is full ({len(self._requests)} requests are running or waiting); "
                "try again later"
            )

        async def queue(end: float | None) -> None:
            wire = request.request.to_wire()
            queued = QueuedRequest(wire, request.footprint, priority, end, number=0)
            self._queued[request.uid] = queued
            await self._hand_over(queued)

        updates = self._requests.updates(request.uid, deadline, queue, self._cancel)
        try:
            async with aclosing(updates):
                async for update in updates:
                    yield update
        finally:
            self._queued.pop(request.uid, None)

    def _cancel(self, uid: int) -> None:
        self._coordinator.cancel.remote(uid)

    def _open(self) -> list[QueuedRequest]:
        return [queued for uid, queued in self._queued.items() if uid in self._requests]

    async def apply(self, change: EngineChange) -> str:
        return await self.weights.apply(change, self._make)

    async def ask_trainer(self, order: TrainerOrder) -> Received:
        self._requests.check()
        try:
            return granted(await self._coordinator.ask_trainer.remote(order))
        except RayError:
            raise ValueError(lost(order.group)) from None

    async def _make(self, change: Change, in_flight: InFlight) -> str:
        """Have the coordinator make a change; if it is lost meanwhile, the next one."""
        while True:
            while self._replacing:  # a coordinator loses what it takes before it has started
                await asyncio.sleep(_RETRY_S)
            self._requests.check()
            coordinator = self._coordinator
            try:
                reason: str = await coordinator.change.remote(change, in_flight)
                self._requests.check()
                return reason
            except ActorUnavailableError:
                await asyncio.sleep(_RETRY_S)
            except RayActorError:
                while self._coordinator is coordinator:
                    await asyncio.sleep(_RETRY_S)
                    self._requests.check()

    async def load(self) -> Load:
        try:
            load: Load = await asyncio.wait_for(self._coordinator.load.remote(), _ANSWER_S)
        except (RayError, TimeoutError) as error:
            raise EngineFailed(f"the coordinator does not answer: {first_line(error)}") from None
        load = replace(load, coordinator_restarts=self.restarts)
        return self.weights.shown_in(load)

    @property
    def ongoing_tokens(self) -> int:
        """The tokens that open requests may still generate."""
        return sum(queued.missing for queued in self._open())

    async def pids(self) -> list[int]:
        """Return the process ids of the coordinator and the ranks."""
        return [process.pid for process in await self._coordinator.processes.remote()]

    async def check_health(self) -> None:
        self._requests.check()
        if self._listener is None or self._listener.done():
            raise EngineFailed("the task that reads the coordinator's events has ended")

    # The coordinator: its start and its end.

    async def _start_coordinator(self) -> None:
        """Start a coordinator, which starts its ranks."""
        self._coordinator = CoordinatorActor.options(
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, 0),
            name=actor_name(self.model, self.group, "coordinator"),
        ).remote(self.model, self.config, self.group, self.weights.known)
        self._process = None
        try:
            self._process = await self._own_process()
            self.limits = await self._while_it_answers(self._coordinator.start.remote())
        except (RayError, TimeoutError) as error:
            raise EngineFailed(f"{self.model} could not be started: {first_line(error)}") from None
        self._ready = time.monotonic()

    async def _own_process(self) -> Process:
        try:
            async with asyncio.timeout(_PROCESS_S):
                own: Process = (await self._coordinator.processes.remote())[0]
                return own
        except TimeoutError:
            raise TimeoutError(f"its coordinator did not start in {_PROCESS_S:g} s") from None

    async def _while_it_answers(self, call: Awaitable[T]) -> T:
        """Wait for a long call to the coordinator as long as it answers short ones."""
        waiting = asyncio.ensure_future(call)
        try:
            while not waiting.done():
                await answered(
                    self._coordinator.processes.remote(), self.config.heartbeat_timeout_s
                )
                await asyncio.wait([waiting], timeout=self.config.heartbeat_s)
            return await waiting
        finally:
            waiting.cancel()

    def _kill_coordinator(self) -> None:
        ray.kill(self._coordinator, no_restart=True)
        kill_here([self._process] if self._process else [])

    async def close(self, grace: float = 10.0) -> None:
        """End the coordinator and its ranks, and free what they reserved."""
        if self._listener is not None:
            self._listener.cancel()
        if self._coordinator is not None:
            await self._stop_coordinator(grace)
        if self._owns_group:
            remove_placement_group(self.group)

    async def _stop_coordinator(self, grace: float) -> None:
        """Wait until its process has ended; if it were killed, Ray would warn the user."""
        try:
            async with asyncio.timeout(grace + _ANSWER_S):
                await self._while_it_answers(self._coordinator.stop.remote(grace))
            with suppress(RayActorError):  # the answer of an actor that exits
                await asyncio.wait_for(self._coordinator.__ray_terminate__.remote(), _ANSWER_S)
        except (RayError, TimeoutError) as error:
            log.warning("the coordinator did not stop by itself: %s", first_line(error))
            self._kill_coordinator()

    # Requests and events.

    async def _hand_over(self, queued: QueuedRequest) -> None:
        """Submit a request to the coordinator, which ignores one that it already has."""
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
                await asyncio.sleep(_RETRY_S)
                if queued.forwards or coordinator is not self._coordinator:
                    return  # it has arrived
            except RayActorError:
                return  # `_replace_coordinator` hands over all open requests
        if refusal is not None:
            raise refusal.error(refusal.reason)

    async def _listen(self) -> None:
        """Receive the coordinator's events, and replace it if it dies or hangs."""
        number, heard = 0, time.monotonic()
        while self._requests.failure is None:
            try:
                call = self._coordinator.listen.remote(number, self.config.heartbeat_s)
                number, events = await answered(call, self.config.heartbeat_timeout_s)
                heard = time.monotonic()
                for event in decode_events(events):
                    self._take(event)
                continue
            except ActorUnavailableError as error:
                if time.monotonic() - heard < self.config.heartbeat_timeout_s:
                    await asyncio.sleep(_RETRY_S)
                    continue
                reason = f"the coordinator could not be reached: {first_line(error)}"
            except RayActorError as error:
                log.error("the coordinator died: %s", first_line(error))
                assert self._process is not None, "it has answered once"
                reason = f"the coordinator (process {self._process.pid}) {DIED}"
            except TimeoutError as error:
                reason = str(error)
            except Exception as error:
                self._requests.fail(f"the coordinator's events cannot be read: {error}; {AGAIN}")
                return
            await self._replace_coordinator(reason)
            number, heard = 0, time.monotonic()

    def _take(self, event: Event) -> None:
        if event.kind == Kind.ENDED:
            self._requests.fail(event.reason)
        elif routed := self._requests.route([event]):
            if event.update is not None:
                self.weights.heard(event.update.version)
                self._queued[event.uid].follow(event.update)
            self._requests.deliver(routed)
        elif not event.ends:  # it was cancelled, but that call may have been lost
            self._cancel(event.uid)

    async def _replace_coordinator(self, reason: str) -> None:
        requests = continuing(len(self._requests))
        announce(self.model, f"{reason}; {requests} on a new coordinator")
        self._kill_coordinator()
        useful = time.monotonic() - self._ready > _USEFUL_S
        self._replacing = True
        failure = await self._restarts.restart(self._start_again, reason, useful=useful)
        self._replacing = False
        if failure is not None:
            announce(self.model, failure)
            self._requests.fail(f"{failure}; {AGAIN}")
            return
        for queued in self._open():
            if queued.uid not in self._requests:
                continue  # its client has left meanwhile
            queued.again()
            try:
                await self._hand_over(queued)
            except (EngineFailed, Overloaded) as error:
                failed = Event(Kind.FAILED, queued.uid, reason=str(error))
                self._requests.deliver(self._requests.route([failed]))

    async def _start_again(self) -> None:
        try:
            await self._start_coordinator()
        except EngineFailed:
            self._kill_coordinator()
            raise
