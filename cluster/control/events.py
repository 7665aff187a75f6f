"""Events from an engine to its clients: none is lost, and memory is bounded.

A slow reader gets several updates merged into one: the tokens of all, the canvas of the last.
"""

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from msgspec import msgpack

from diffray.workers.messages import Update

AGAIN = "this replica is shutting down; retry, and another one will answer"

PIECES = 32  # unread updates of one request before they are merged


class Kind(StrEnum):
    UPDATE = "update"
    FAILED = "failed"
    LATE = "late"
    POISON = "poison"
    ENDED = "ended"  # the engine answers no more requests


@dataclass(slots=True)
class Event:
    """What happened to a request, or to the engine if the uid is NO_REQUEST."""

    kind: Kind
    uid: int
    update: Update | None = None
    reason: str = ""

    @property
    def ends(self) -> bool:
        """Whether it is its request's last event."""
        return self.update is None or self.update.finish_reason is not None


NO_REQUEST = -1

# For whole issues; pickle, which Ray would use, takes three times as long.
encode_events: Final = msgpack.Encoder().encode
decode_events: Final = msgpack.Decoder(list[Event]).decode


def pile(unread: list[Event], event: Event) -> None:
    """Add an event to its request's unread ones, or merge it into the last."""
    last = unread[-1].update if unread else None
    if last is None or len(unread) < PIECES or event.update is None:
        unread.append(event)
    else:
        last.extend(event.update)


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
        """Return the next issue's number and events, or no events after `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                while number == self._number and not self._next:
                    await self._there.wait()
        except TimeoutError:
            return number, []
        if number == self._number:
            self._number += 1
            self._last = [event for unread in self._next.values() for event in unread]
            self._next = {}
            self._there.clear()
        return self._number, self._last
