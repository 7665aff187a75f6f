"""The desired state of a deployment, kept in the cluster; and the groups of trainers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import msgspec
from ray.experimental import internal_kv

from diffray.cluster.api.operations import AnyChange, LoadAdapter, UnloadAdapter
from diffray.cluster.control.engine_client import EngineClient, EngineFailed, Load
from diffray.cluster.control.weight_changes import InFlight, Sleep, UpdateWeights, already
from diffray.cluster.serve.replicas import Replicas
from diffray.components.checkpoints.folder import pinned
from diffray.components.lora import LoRA
from diffray.workers.adapters import LoadedAdapters
from diffray.workers.messages import AWAKE
from diffray.workers.trainer_orders import (
    JoinTrainer,
    Received,
    TrainerOrder,
    granted,
    lost,
)

Tell = Callable[..., Awaitable[list[Any]]]  # calls a method of all replicas
Members = tuple[str, ...]  # the names of replicas, in the order of their ranks

_NO_MEMBERS: Final[Members] = ()


class Share(NamedTuple):
    """The result of an order on one member of a group."""

    received: Received
    members: Members


class WithTrainer:
    """One replica in a trainer's group; `own` is its name, `ranks` its number of ranks."""

    def __init__(self, engine: EngineClient, own: str, ranks: int, tell: Tell) -> None:
        self._engine, self.own, self._ranks, self._tell = engine, own, ranks, tell
        self._members: dict[str, Members] = {}  # by group

    async def ask_all(self, order: TrainerOrder) -> Received:
        """Have all replicas carry out an order; raise ValueError if one of them cannot."""
        members = _NO_MEMBERS if order.join is None else await self._joining(order.join)
        shares = [each for each in await self._tell("share", order, members) if each is not None]
        if not shares:
            raise ValueError(
                f"no replica is in a group {order.group!r}; create it (init_weights_update_group)"
            )
        found = {each.received for each in shares}
        if len(shares) == len(shares[0].members) and len(found) == 1:
            return granted(found.pop())
        await self._tell("share", TrainerOrder(order.group), _NO_MEMBERS)
        refused = [each for each in found if each.refusal]
        return granted(refused[0] if refused else Received(lost(order.group)))

    async def _joining(self, order: JoinTrainer) -> Members:
        """Return the replicas that will join; raise ValueError if the group's size does not fit."""
        members = tuple(sorted(await self._tell("member")))
        if self.own not in members:
            raise EngineFailed("no replica answered; try again")
        needed = order.rank + self._ranks * len(members)
        if order.size != needed:
            raise ValueError(
                f"world_size is {order.size}, but must be {needed} for ranks from {order.rank} on "
                f"(replicas: {len(members)}, ranks per replica: {self._ranks})"
            )
        return members

    async def share(self, order: TrainerOrder, members: Members) -> Share | None:
        """Carry out this replica's share of an order; return None if it is not in the group."""
        if order.join is not None:
            if self.own not in members:
                return None
            first = order.join.rank + members.index(self.own) * self._ranks
            order = replace(order, join=replace(order.join, rank=first))
        elif order.receive is not None:
            members = self._members.get(order.group, _NO_MEMBERS)
        else:
            members = self._members.pop(order.group, _NO_MEMBERS)
        if not members:
            return None
        try:
            received = await self._engine.ask_trainer(order)
        except (ValueError, EngineFailed) as error:
            return Share(Received(str(error)), members)
        if order.join is not None:
            self._members[order.group] = members
        return Share(received, members)


log = logging.getLogger("ray.serve")

_SPACE: Final = b"diffray"
_LOOK_S: Final = 5.0  # between checks of the record, in case a notification was lost
_KEPT: Final = 100  # most recent entries of a record


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The state that every replica must reach; a higher number replaces it."""

    number: int = 0
    updates: int = 0  # how often the weights were replaced
    version: str = "0"  # of the weights
    source: str = ""  # of the weights; empty: the model's checkpoint
    in_flight: InFlight = "finish"
    level: int = AWAKE  # the sleep level
    adapters: tuple[LoRA, ...] | None = None  # None: those of the configuration


class Record:
    """The desired states of one deployment, in Ray's key-value store, which outlives replicas."""

    def __init__(self, deployment: str) -> None:
        self._prefix = f"desired:{deployment}:".encode()

    async def newest(self) -> DesiredState:
        return await asyncio.to_thread(self._newest)

    async def put(self, desired: DesiredState) -> bool:
        """Write a state; return False if another operator has taken its number."""
        return await asyncio.to_thread(self._put, desired)

    def _newest(self) -> DesiredState:
        keys = internal_kv._internal_kv_list(self._prefix, namespace=_SPACE)
        if not keys:
            return DesiredState()
        found = internal_kv._internal_kv_get(max(keys), namespace=_SPACE)
        return msgspec.msgpack.decode(found, type=DesiredState)

    def _put(self, desired: DesiredState) -> bool:
        key, text = self._key(desired.number), msgspec.msgpack.encode(desired)
        taken = internal_kv._internal_kv_put(key, text, overwrite=False, namespace=_SPACE)
        # Older entries stay for a while, so that a slow operator cannot reuse a number.
        internal_kv._internal_kv_del(self._key(desired.number - _KEPT), namespace=_SPACE)
        return not taken

    def _key(self, number: int) -> bytes:
        return self._prefix + f"{number:020d}".encode()


class EveryReplica:
    """Carries out an operator's requests on all replicas of a deployment, including this one.

    The record holds the desired state. Each replica brings its own `engine` to that state when it
    starts, when it is notified, and, if the notification is lost, a few seconds later. `check`
    raises ValueError for a folder that does not fit; only what fits all replicas is recorded. `own`
    is this replica's name, `ranks` its number of ranks.
    """

    def __init__(
        self,
        engine: EngineClient,
        adapters: LoadedAdapters,
        replicas: Replicas,
        record: Record,
        check: Callable[[str], None],
        patience_s: float,
        own: str,
        ranks: int = 1,
    ) -> None:
        self._engine, self._adapters = engine, adapters
        self._configured = adapters.all
        self._replicas, self._record = replicas, record
        self._check, self._patience_s = check, patience_s
        self.with_trainer = WithTrainer(engine, own, ranks, self._tell)
        self._has = DesiredState()
        self._following = asyncio.Lock()
        self.failure = ""  # why this replica cannot reach the desired state

    # For an operator.

    async def apply(self, change: AnyChange) -> str:
        """Bring all replicas to the state after a change; return the weights' version."""
        if isinstance(change, LoadAdapter):
            change = replace(change, path=await asyncio.to_thread(pinned, change.path))
        if isinstance(change, UpdateWeights | LoadAdapter):
            self._after(change, await self._record.newest())
            refusals = await self._tell("check", change)
            if not refusals:
                raise EngineFailed("no replica answered; try again")
            if refused := next(filter(None, refusals), ""):
                raise ValueError(refused)
        return (await self._set_desired(change)).version

    def _after(self, change: AnyChange, before: DesiredState) -> DesiredState:
        """Return the desired state after a change; raise ValueError if there can be none."""
        match change:
            case Sleep(level):
                return replace(before, level=level)
            case UpdateWeights(source, in_flight, version):
                updates = before.updates + 1
                name = version or str(updates)
                if name == before.version:
                    raise ValueError(already(name))
                return replace(
                    before, updates=updates, version=name, source=str(source), in_flight=in_flight
                )
        known = self._known(before)
        self._adapters.replace(known)
        if isinstance(change, UnloadAdapter):
            found = self._adapters.find(change.name, "lora_name")
            return replace(before, adapters=tuple(each for each in known if each != found))
        if self._adapters.has(change.name, change.path):
            return before  # a repeated call, perhaps because a replica was lost
        self._adapters.check_name(change.name)
        return replace(before, adapters=(*known, LoRA.loaded_now(change.name, change.path)))

    def _known(self, desired: DesiredState) -> tuple[LoRA, ...]:
        return self._configured if desired.adapters is None else desired.adapters

    async def ask_trainer(self, order: TrainerOrder) -> Received:
        return await self.with_trainer.ask_all(order)

    async def load(self) -> Load:
        return await self._engine.load()

    async def _set_desired(self, change: AnyChange) -> DesiredState:
        """Record the desired state, and wait until the replicas have reached it."""
        while True:
            before = await self._record.newest()
            desired = replace(self._after(change, before), number=before.number + 1)
            if await self._record.put(desired):
                break
        # A replica that the call does not reach reads the record a few seconds later.
        found = await self._tell("catch_up") or [await self.catch_up()]
        failed = [reason for reason in found if reason]
        if failed:
            raise EngineFailed(f"{failed[0]}; that replica is being replaced")
        return desired

    async def _tell(self, method: str, *given: object) -> list[Any]:
        return await self._replicas.ask("of_every", method, *given, within=self._patience_s) or []

    # For each replica.

    async def check(self, change: UpdateWeights | LoadAdapter) -> str:
        """Return why the files of a change do not fit this replica's model, or an empty string."""
        try:
            if isinstance(change, LoadAdapter):
                await asyncio.to_thread(self._adapters.check, change.path)
            else:
                await asyncio.to_thread(self._check, str(change.source))
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    async def member(self) -> str:
        """Return this replica's name, for a trainer's group."""
        return self.with_trainer.own

    async def share(self, order: TrainerOrder, members: Members) -> Share | None:
        """Carry out this replica's share of a trainer's order."""
        return await self.with_trainer.share(order, members)

    async def catch_up(self) -> str:
        """Bring this replica to the desired state; return why that failed, or an empty string."""
        async with self._following:
            desired = await self._record.newest()
            if desired.number <= self._has.number:
                return self.failure
            try:
                await self._bring_to(desired)
                self.failure = ""
            except ValueError as error:
                self.failure = f"a replica cannot use the weights {desired.version}: {error}"
            self._has = desired
            return self.failure

    async def _bring_to(self, desired: DesiredState) -> None:
        self._adapters.replace(self._known(desired))
        if desired.updates != self._has.updates:
            change = UpdateWeights(desired.source, desired.in_flight, desired.version)
            await self._engine.apply(change)
        if desired.level != self._has.level:
            await self._engine.apply(Sleep(desired.level))

    async def keep_up(self) -> None:
        """Catch up periodically."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.catch_up()
            except Exception:
                log.exception("this replica could not read or reach the desired state")
