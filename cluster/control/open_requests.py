"""The open requests of an engine client, and their unread events."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from diffray.cluster.control.engine_client import DeadlineExceeded, EngineFailed, Poisonous
from diffray.cluster.control.events import Event, Kind, pile
from diffray.workers.messages import Update


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
