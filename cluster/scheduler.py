"""Who runs next: the queue, admission by slots and pages, and what each round is told.

Integers only. It has no clock, no network and no torch: the coordinator asks it for rounds and
tells it what came of them.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from diffray.cluster.client import Overloaded

# News for those who wait: [kind, ...] with plain values.
UPDATE, FAILED, LATE = "update", "failed", "late"


@dataclass(slots=True)
class Ticket:
    """A request, passed on as it came, and where it stands if it has to begin again elsewhere."""

    packed: dict[str, Any]
    pages: int  # of K/V that its first block needs
    priority: int
    deadline: float | None  # on the coordinator's clock
    number: int  # of its arrival
    ids: list[int] = field(default_factory=list)
    progress: list[int] = field(default_factory=lambda: [0, 0])
    forwards: int = 0

    @property
    def uid(self) -> int:
        return int(self.packed["uid"])

    @property
    def order(self) -> tuple[int, int]:
        """Lower runs first: by priority, then as they came."""
        return self.priority, self.number

    def follow(self, update: list[Any]) -> None:
        """Remember an update, packed as `Update.pack` does."""
        self.ids += update[1]
        self.forwards, self.progress = update[6], update[7]

    def again(self) -> None:
        """Let the request go on from what it has reported."""
        if self.ids:
            resume = [list(self.ids), self.progress, self.forwards]
            self.packed = self.packed | {"resume": resume}


class Scheduler:
    """The books of one engine, kept from outside."""

    def __init__(self, slots: int, pages: int, max_waiting: int, check_every: int = 0) -> None:
        self.slots, self.pages = slots, pages
        self.max_waiting, self.check_every = max_waiting, check_every
        self.running: dict[int, Ticket] = {}
        self._waiting: list[tuple[tuple[int, int], Ticket]] = []  # a heap
        self._open: dict[int, Ticket] = {}  # waiting or running
        self._cancelled: list[int] = []  # not yet told to the ranks
        self._flying: deque[int] = deque()  # pages promised in each round whose reply is not there
        self._free, self._held_back = pages, 0  # as of the last reply
        self._arrivals = self._rounds = 0

    @property
    def waiting(self) -> int:
        return len(self._open) - len(self.running)

    @property
    def queued_tokens(self) -> int:
        """Tokens asked for and not yet there, of all open requests: what autoscaling looks at."""
        return sum(t.packed["params"]["max_tokens"] - len(t.ids) for t in self._open.values())

    def submit(
        self, packed: dict[str, Any], pages: int, priority: int = 0, deadline: float | None = None
    ) -> None:
        """Queue a request, or raise Overloaded; one that is known already is not queued twice.

        After a loss it may be handed over by its own caller and by who hands over all that is open.
        """
        if packed["uid"] in self._open:
            return
        if self.waiting >= self.max_waiting + max(self.slots - len(self.running), 0):
            raise Overloaded(
                f"the queue is full ({self.waiting} requests are waiting, "
                f"{len(self.running)} are running); try again later"
            )
        ticket = Ticket(packed, pages, priority, deadline, self._arrivals)
        self._arrivals += 1
        self._open[ticket.uid] = ticket
        heapq.heappush(self._waiting, (ticket.order, ticket))

    def cancel(self, uid: int) -> None:
        """Forget a request, if it is still there; the next round frees what it holds."""
        self._open.pop(uid, None)
        if self.running.pop(uid, None):
            self._cancelled.append(uid)
        elif len(self._waiting) > 2 * len(self._open) + 16:
            self._waiting = [(t.order, t) for _, t in self._waiting if self._open.get(t.uid) is t]
            heapq.heapify(self._waiting)

    def plan(self, steps: int) -> dict[str, Any] | None:
        """Return what the ranks are told next, or None where there is nothing to do."""
        admitted = list(self._admit())
        if not self.running and not self._cancelled:
            return None
        self._rounds += 1
        self._flying.append(sum(ticket.pages for ticket in admitted))
        cancelled, self._cancelled = self._cancelled, []
        return {
            "number": self._rounds,
            "cancel": cancelled,
            "add": [ticket.packed for ticket in admitted],
            "steps": steps,
            "check": self.check_every > 0 and self._rounds % self.check_every == 0,
        }

    def settle(self, reply: dict[str, Any]) -> list[list[Any]]:
        """Take over a round's reply and return the news of those who are still waited for."""
        self._flying.popleft()
        self._free = reply["stats"]["free_pages"]
        self._held_back = reply["stats"]["waiting"]
        news: list[list[Any]] = []
        for update in reply["updates"]:
            ticket = self.running.get(update[0])
            if ticket is None:
                continue  # cancelled while the round ran
            ticket.follow(update)
            news.append([UPDATE, update[0], update])
            if update[4] is not None:  # the finish reason
                self._close(ticket.uid)
        for uid, reason in reply["refused"]:
            if uid in self.running:
                self._close(uid)
                news.append([FAILED, uid, reason])
        return news

    def expire(self, now: float) -> list[list[Any]]:
        """Cancel the requests whose time is up and return the news of that."""
        late = [t.uid for t in self._open.values() if t.deadline is not None and t.deadline <= now]
        for uid in late:
            self.cancel(uid)
        return [[LATE, uid] for uid in late]

    def restart(self) -> None:
        """The ranks are new and know of nothing: what ran is queued again, and goes on."""
        for ticket in self.running.values():
            ticket.again()
            heapq.heappush(self._waiting, (ticket.order, ticket))
        self.running.clear()
        self._cancelled.clear()
        self._flying.clear()
        self._free, self._held_back = self.pages, 0

    def fail_all(self, reason: str) -> list[list[Any]]:
        """Give up every request and return the news of that."""
        uids = list(self._open)
        self.restart()
        self._open.clear()
        self._waiting.clear()
        return [[FAILED, uid, reason] for uid in uids]

    def _admit(self) -> Iterator[Ticket]:
        """Take requests in order while slots and pages last; the first one is never passed over."""
        free = self._free - sum(self._flying)
        while self._waiting and len(self.running) < self.slots:
            ticket = self._waiting[0][1]
            if self._open.get(ticket.uid) is not ticket:
                heapq.heappop(self._waiting)  # cancelled meanwhile
                continue
            if self.running and (self._held_back or ticket.pages > free):
                return
            heapq.heappop(self._waiting)
            free -= ticket.pages
            self.running[ticket.uid] = ticket
            yield ticket

    def _close(self, uid: int) -> None:
        del self.running[uid]
        del self._open[uid]
