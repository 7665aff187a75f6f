"""Who runs next: the queue, admission by slots and pages, and what each round is told.

Integers only. It has no clock, no network and no torch: the coordinator asks it for rounds and
tells it what came of them.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from diffray.cluster.control.engine_client import Overloaded, Poisonous
from diffray.cluster.control.events import Event, Kind
from diffray.cluster.control.quarantine import REASON, Suspects
from diffray.cluster.control.queued_request import Ticket
from diffray.workers.messages import Reply, Round, WireRequest

PASSES = 16  # how many may run before a request that finds no pages
FIRST_COME = 8  # of so many that begin, one is the one that came first, whoever else waits
LONGEST = 16  # time slices: the turn of a request while others wait that ask for as much


@dataclass(frozen=True, slots=True)
class _Flight:
    """A round whose reply is not there."""

    admitted: list[Ticket]
    leaving: list[Ticket]  # that give way and will go on later
    steps: int  # at most

    @property
    def pages(self) -> int:
        return sum(ticket.needs for ticket in self.admitted)


class Scheduler:
    """The books of one engine, kept from outside.

    Where others wait, a request gives way after a turn (0 steps: never) and goes on later with the
    same tokens. Requests are admitted by priority, then turns, then arrival; but one of every
    FIRST_COME admissions goes to the oldest request, so that none starves.
    """

    def __init__(
        self,
        slots: int,
        pages: int,
        max_waiting: int,
        check_every: int = 0,
        time_slice: int = 0,
    ) -> None:
        self.slots, self.pages = slots, pages
        self.max_waiting, self.check_every = max_waiting, check_every
        self.time_slice = time_slice
        self.running: dict[int, Ticket] = {}
        self.suspects = Suspects()
        self._waiting: list[tuple[tuple[int, int, int, int], Ticket]] = []  # sorted
        self._open: dict[int, Ticket] = {}  # waiting, running or giving way
        self._cancelled: list[int] = []  # not yet told to the ranks
        self._leaving: dict[int, Ticket] = {}  # told, or about to be told, to give way
        self._flying: deque[_Flight] = deque()
        self._free, self._held_back = pages, 0  # as of the last reply
        self._arrivals = self._admitted = self._rounds = self._steps = 0
        self.gave_way = 0

    @property
    def waiting(self) -> int:
        return len(self._open) - len(self.running)

    def submit(
        self,
        request: WireRequest,
        pages: int,
        priority: int = 0,
        deadline: float | None = None,
        most: int = 0,
    ) -> None:
        """Queue a request, or raise Overloaded; one that is known already is not queued twice.

        After a loss it may be handed over by its own caller and by who hands over all that is open.
        """
        if self.knows(request.uid):
            return
        if self.suspects.is_known(request, self._arrivals):
            raise Poisonous(REASON)
        if self.waiting >= self.max_waiting + max(self.slots - len(self.running), 0):
            raise Overloaded(
                f"the queue is full ({self.waiting} requests are waiting, "
                f"{len(self.running)} are running); try again later"
            )
        ticket = Ticket(request, pages, priority, deadline, self._arrivals, most)
        if (resume := request.resume) is not None:  # it has come from another coordinator
            ticket.ids = list(resume.ids)
            ticket.progress, ticket.forwards = resume.progress, resume.forwards
        self._arrivals += 1
        self._open[ticket.uid] = ticket
        insort(self._waiting, (ticket.order, ticket))

    def knows(self, uid: int) -> bool:
        """Return whether this request is running or waiting."""
        return uid in self._open

    def cancel(self, uid: int) -> None:
        """Forget a request, if it is still there; the next round frees what it holds."""
        ticket = self._open.pop(uid, None)
        if ticket is None:
            return
        self.suspects.forget(ticket)
        if self.running.pop(uid, None):
            self._cancelled.append(uid)
        elif not self._leaving.pop(uid, None):
            at = bisect_left(self._waiting, (ticket.order,))
            if at < len(self._waiting) and self._waiting[at][1] is ticket:
                del self._waiting[at]

    def plan(self, steps: int) -> Round | None:
        """Return what the ranks are told next, or None where there is nothing to do."""
        admitted: list[Ticket] = []
        self._admit(admitted)
        leaving = self._make_way()
        if leaving:
            self._admit(admitted)
        if not self.running and not self._cancelled:
            return None
        self._rounds += 1
        self._steps += steps
        self._flying.append(_Flight(admitted, leaving, steps))
        cancelled, self._cancelled = self._cancelled, []
        return Round(
            number=self._rounds,
            cancel=cancelled,
            add=[ticket.request for ticket in admitted],
            steps=steps,
            check=self.check_every > 0 and self._rounds % self.check_every == 0,
        )

    def settle(self, reply: Reply) -> list[Event]:
        """Take over a round's reply and return the news of those who are still waited for."""
        flight = self._flying.popleft()
        self._steps -= flight.steps - reply.steps
        self._free, self._held_back = reply.stats.free_pages, reply.stats.waiting
        for ticket in flight.admitted:
            ticket.answered = True
        news: list[Event] = []
        for update in reply.updates:
            found = self.running.get(update.uid) or self._leaving.get(update.uid)
            if found is None:
                continue  # cancelled while the round ran
            found.follow(update)
            news.append(Event(Kind.UPDATE, update.uid, update))
            if update.finish_reason is not None:
                self._close(found)
        for uid, reason in reply.refused:
            if found := self.running.get(uid):
                self._close(found)
                news.append(Event(Kind.FAILED, uid, reason=reason))
        for ticket in flight.leaving:
            if self._leaving.pop(ticket.uid, None):
                self._queue_again(ticket)
        self.suspects.settle()
        return news

    def expire(self, now: float) -> list[Event]:
        """Cancel the requests whose time is up and return the news of that."""
        late = [t.uid for t in self._open.values() if t.deadline is not None and t.deadline <= now]
        for uid in late:
            self.cancel(uid)
        return [Event(Kind.LATE, uid) for uid in late]

    def restart(self) -> list[Event]:
        """The ranks are new and know of nothing: what ran goes on, but for what has ended them.

        Returns the news of the latter.
        """
        ran = [*self.running.values(), *self._leaving.values()]
        guilty, clear = self.suspects.judge(ran, self._arrivals)
        for ticket in ran:
            ticket.again()
        for ticket in clear:
            insort(self._waiting, (ticket.order, ticket))
        for ticket in guilty:
            del self._open[ticket.uid]
        self._forget_ranks()
        return [Event(Kind.POISON, ticket.uid, reason=REASON) for ticket in guilty]

    def fail_all(self, reason: str) -> list[Event]:
        """Give up every request and return the news of that."""
        uids = list(self._open)
        self._open.clear()
        self._waiting.clear()
        self.suspects = Suspects()
        self._forget_ranks()
        return [Event(Kind.FAILED, uid, reason=reason) for uid in uids]

    def _forget_ranks(self) -> None:
        self.running.clear()
        self._cancelled.clear()
        self._leaving.clear()
        self._flying.clear()
        self._free, self._held_back = self.pages, 0

    def _admit(self, admitted: list[Ticket]) -> None:
        """Let requests run that may: after a loss one by one the suspects, then the others."""
        free = self._free - sum(flight.pages for flight in self._flying)
        free -= sum(ticket.needs for ticket in admitted)
        for ticket in self._next_suspect(free) if self.suspects else self._next(free):
            self._admitted += 1
            ticket.began, ticket.answered = self._steps, False
            self.running[ticket.uid] = ticket
            admitted.append(ticket)

    def _next(self, free: int) -> Iterator[Ticket]:
        """Take requests in order while slots and pages last.

        One that finds no pages is passed by others, but not by so many that it starves.
        """
        passed: list[Ticket] = []
        waiting = self._in_order() if len(self.running) < self.slots else iter(())
        for ticket in waiting:
            if len(self.running) >= self.slots:
                return
            if passed and ticket.turns:
                continue  # it has just given way, so that one of those gets on
            if self._lacks_pages(ticket, free):
                if ticket.passed >= PASSES:
                    return
                passed.append(ticket)
                continue
            for other in passed:
                other.passed += 1
            del self._waiting[bisect_left(self._waiting, (ticket.order,))]
            free -= ticket.needs
            yield ticket

    def _in_order(self) -> Iterator[Ticket]:
        """Yield the waiting requests in order; one of every FIRST_COME is the oldest."""
        best = [ticket for _, ticket in self._waiting]
        queues = iter(sorted(best, key=lambda ticket: ticket.number)), iter(best)
        seen: set[int] = set()
        for turn in range(self._admitted + 1, self._admitted + 1 + len(best)):
            queue = queues[min(turn % FIRST_COME, 1)]
            ticket = next(ticket for ticket in queue if ticket.uid not in seen)
            seen.add(ticket.uid)
            yield ticket

    def _next_suspect(self, free: int) -> Iterator[Ticket]:
        """Take the next of those that may have ended the ranks, if none is on trial."""
        suspects = self.suspects
        if suspects.on_trial is not None or not suspects.queue:
            return
        if len(self.running) >= self.slots:
            return
        if not self._lacks_pages(suspects.queue[0], free):
            yield suspects.try_next()

    def _lacks_pages(self, ticket: Ticket, free: int) -> bool:
        """Whether a request has to wait for pages; alone it always has enough of them."""
        return bool(self.running) and (self._held_back > 0 or ticket.needs > free)

    def _make_way(self) -> list[Ticket]:
        """Choose who gives way to those that have found no room: the one that ran longest."""
        if not self.time_slice or self._leaving or self.suspects.on_trial is not None:
            return []
        wait = [*self.suspects.queue[:1], *(ticket for _, ticket in self._waiting[:1])]
        if not wait and not self._held_back:
            return []
        able = [t for t in self.running.values() if t.answered and self._may_go(t, wait)]
        if not able:
            return []
        ticket = min(able, key=lambda t: t.began)
        ticket.turns += 1
        self.gave_way += 1
        del self.running[ticket.uid]
        self._leaving[ticket.uid] = ticket
        self._cancelled.append(ticket.uid)
        return [ticket]

    def _may_go(self, ticket: Ticket, wait: list[Ticket]) -> bool:
        """Whether a request has run for long enough, with a view to who waits.

        Turns become longer: what has to begin anew, as soft generations do, ends in the end.
        """
        if any(other.priority > ticket.priority for other in wait):
            return False
        turn = self.time_slice * ticket.growth
        if all(other.turns >= ticket.turns for other in wait):
            # Of equals none gives way, as that would only make all of them end later.
            asked = min((other.missing for other in wait), default=0)
            turn = max(turn, min(asked, LONGEST * self.time_slice))
        return self._steps - ticket.began >= turn

    def _queue_again(self, ticket: Ticket) -> None:
        """Queue a request behind those that wait now; it goes on from what it has reported."""
        ticket.again()
        ticket.number = self._arrivals
        self._arrivals += 1
        insort(self._waiting, (ticket.order, ticket))

    def _close(self, ticket: Ticket) -> None:
        self.running.pop(ticket.uid, None)
        self._leaving.pop(ticket.uid, None)
        del self._open[ticket.uid]
        self.suspects.forget(ticket)
