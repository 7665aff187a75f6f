"""Events on their way from the ranks to who asked: bounded, and none lost if an answer is.

A reader that does not take its updates gets several in one: the tokens of all, the canvas of the
last.
"""

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from diffray.workers.messages import Update

AGAIN = "the replica is of no more use, and another one may be asked again"

PIECES = 32  # updates of one request that wait one by one


class Kind(StrEnum):
    """What has happened."""

    UPDATE = "update"
    FAILED = "failed"
    LATE = "late"
    POISON = "poison"
    ENDED = "ended"  # no request will be answered any more


@dataclass(slots=True)
class Event:
    """News of a request; of none if the engine has ended."""

    kind: Kind
    uid: int
    update: Update | None = None
    reason: str = ""

    @property
    def ends(self) -> bool:
        """Whether it is the last of its request."""
        return self.update is None or self.update.finish_reason is not None


NOBODY = -1  # the uid of an event that concerns all


def pile(pieces: list[Event], event: Event) -> None:
    """Add an event of a request to those that nobody has taken yet; the last may become longer."""
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
