"""Makes all replicas of a deployment join a trainer's group and receive its weights, or none.

A replica that starts later is not in the group; it loads the folder that the others have received.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from diffray.cluster.control.engine_client import EngineClient, EngineFailed
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
