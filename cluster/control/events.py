"""What a coordinator reports of its requests, and the clients that wait for it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from msgspec import msgpack

from diffray.cluster.control.engine_client import DeadlineExceeded, EngineFailed, Poisonous
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


class Mailbox:
    """The unread events of one request, for one reader."""

    def __init__(self) -> None:
        self._unread: list[Event] = []
        self._there = asyncio.Event()

    def put(self, event: Event) -> None:
        pile(self._unread, event)
        self._there.set()

    async def get(self) -> Event:
        await self._there.wait()
        event = self._unread.pop(0)
        if not self._unread:
            self._there.clear()
        return event


class OpenRequests:
    """A mailbox for each request until its last event; used by one event loop at a time."""

    def __init__(self) -> None:
        self.failure: str | None = None  # why the engine answers no more requests
        self._mailboxes: dict[int, Mailbox] = {}

    def __len__(self) -> int:
        return len(self._mailboxes)

    def __contains__(self, uid: int) -> bool:
        return uid in self._mailboxes

    def check(self) -> None:
        if self.failure is not None:
            raise EngineFailed(self.failure)

    async def updates(
        self,
        uid: int,
        deadline: float | None,
        submit: Callable[[float | None], Awaitable[None]],
        cancel: Callable[[int], None],
    ) -> AsyncGenerator[Update, None]:
        """Submit a request and yield its updates; if that is interrupted, cancel it.

        `submit` takes the deadline on the loop's clock. Raises what made the request fail. The
        engine watches the deadline too, because no clock runs here while the client does not read.
        """
        if uid in self._mailboxes:
            raise ValueError(f"request {uid} is already running; give another uid")
        end = None if deadline is None else asyncio.get_running_loop().time() + deadline
        mailbox = self._mailboxes[uid] = Mailbox()
        try:
            async with asyncio.timeout_at(end):
                await submit(end)
            while True:
                async with asyncio.timeout_at(end):
                    event = await mailbox.get()
                if event.kind == Kind.LATE:
                    raise TimeoutError
                if event.update is None:
                    failed = Poisonous if event.kind == Kind.POISON else EngineFailed
                    raise failed(event.reason)
                yield event.update
                if event.ends:
                    return
        except TimeoutError:
            raise DeadlineExceeded(f"the answer was not complete after {deadline:g} s") from None
        finally:
            if self._mailboxes.get(uid) is mailbox:  # it has not ended
                del self._mailboxes[uid]
                cancel(uid)

    def route(self, events: list[Event]) -> list[tuple[Mailbox, Event]]:
        """Return the events of open requests with their mailboxes, for `deliver`."""
        found = [(self._mailboxes.get(event.uid), event) for event in events]
        return [(mailbox, event) for mailbox, event in found if mailbox is not None]

    def deliver(self, routed: list[tuple[Mailbox, Event]]) -> None:
        for mailbox, event in routed:
            mailbox.put(event)
            # With its last event a request is closed, even if its client has not read it yet.
            if event.ends and self._mailboxes.get(event.uid) is mailbox:
                del self._mailboxes[event.uid]

    def fail(self, reason: str) -> None:
        """Fail all requests, including future ones; the first reason counts."""
        self.failure = self.failure or reason
        failed = [Event(Kind.FAILED, uid, reason=self.failure) for uid in self._mailboxes]
        self.deliver(self.route(failed))
