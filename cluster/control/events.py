"""Events on their way from an engine to its clients: bounded in memory, none lost.

A slow reader gets several updates merged into one: the tokens of all, the canvas of the last.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum

from diffray.cluster.control.engine_client import DeadlineExceeded, EngineFailed, Poisonous
from diffray.workers.messages import Update

AGAIN = "this replica is shutting down; retry, and another one will answer"

PIECES = 32  # updates of one request that wait one by one


class Kind(StrEnum):
    UPDATE = "update"
    FAILED = "failed"
    LATE = "late"
    POISON = "poison"
    ENDED = "ended"  # no request will be answered any more


@dataclass(slots=True)
class Event:
    """What happened to a request, or to the engine where the uid is NOBODY."""

    kind: Kind
    uid: int
    update: Update | None = None
    reason: str = ""

    @property
    def ends(self) -> bool:
        """Whether it is the last of its request."""
        return self.update is None or self.update.finish_reason is not None


NOBODY = -1


def pile(pieces: list[Event], event: Event) -> None:
    """Add an event to those of its request that are unread, or merge it into the last."""
    last = pieces[-1].update if pieces else None
    if last is None or len(pieces) < PIECES or event.update is None:
        pieces.append(event)
    else:
        last.extend(event.update)


class Mailbox:
    """The events of one request, for one reader."""

    def __init__(self) -> None:
        self._pieces: list[Event] = []
        self._there = asyncio.Event()

    def put(self, event: Event) -> None:
        pile(self._pieces, event)
        self._there.set()

    async def get(self) -> Event:
        await self._there.wait()
        event = self._pieces.pop(0)
        if not self._pieces:
            self._there.clear()
        return event


async def updates_from(
    mailbox: Mailbox, deadline: float | None, end: float | None
) -> AsyncGenerator[Update, None]:
    """Yield a request's updates, until `end` on the loop's clock; raises what made it fail.

    Whoever drives the scheduler watches the deadline too: no clock runs here for a client that does
    not read.
    """
    try:
        while True:
            async with asyncio.timeout_at(end):
                event = await mailbox.get()
            if event.update is not None:
                yield event.update
                if event.ends:
                    return
            elif event.kind == Kind.LATE:
                raise TimeoutError
            else:
                failed = Poisonous if event.kind == Kind.POISON else EngineFailed
                raise failed(event.reason)
    except TimeoutError:
        raise too_late(deadline) from None


def too_late(deadline: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"the answer was not complete after {deadline:g} s")


class Bulletin:
    """The events of all requests in numbered issues; the last is kept until it has arrived."""

    def __init__(self) -> None:
        self._number = 0
        self._last: list[Event] = []
        self._next: dict[int, list[Event]] = {}
        self._there = asyncio.Event()

    def put(self, event: Event) -> None:
        pile(self._next.setdefault(event.uid, []), event)
        self._there.set()

    async def after(self, number: int, patience: float) -> tuple[int, list[Event]]:
        """Return the issue after this one with its number, or nothing new after `patience` s."""
        try:
            async with asyncio.timeout(patience):
                while number == self._number and not self._next:
                    await self._there.wait()
        except TimeoutError:
            return number, []
        if number == self._number:
            self._number += 1
            self._last = [event for pieces in self._next.values() for event in pieces]
            self._next = {}
            self._there.clear()
        return self._number, self._last
