"""Decides what runs next: the queue, admission by slots and pages, and each round.

It handles integers only, without a clock, network or torch; a driver takes its rounds to ranks.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

from diffray.cluster.control.engine_client import Overloaded, Poisonous
from diffray.cluster.control.events import Event, Kind
from diffray.cluster.control.request_queue import (
    CrashQuarantine,
    QueuedRequest,
    RoundInFlight,
    RunningPrefixes,
)
from diffray.cluster.control.weight_changes import LOST, WeightChanges
from diffray.workers.messages import Footprint, Reply, Round, Schedulable

PASSES = 16  # how many later requests may run before one that finds no pages
FIRST_COME = 8  # one of this many admissions goes to the oldest request, whatever its priority
SHORT = 8  # the part of a time slice after which a request gives way to those of better priority
LONGEST = 16  # the most time slices of a turn while only equally preempted requests wait
TOKENS = 2  # tokens that count as one step of a turn
NEAR = 64  # waiting requests whose lengths limit a turn


class Scheduler:
    """Schedules the requests of one engine.

    While others wait, a request is preempted after a turn of `time_slice` steps, or of TOKENS
    times as many tokens (0: never), and resumed later with the same tokens. Requests are admitted
    by `QueuedRequest.order`, but one of every FIRST_COME admissions goes to the oldest request.
    """

    def __init__(
        self,
        slots: int,
        pages: int,
        max_waiting: int,
        check_every: int = 0,
        time_slice: int = 0,
        page_size: int = 1,
        weights: WeightChanges | None = None,
    ) -> None:
        self.slots, self.pages = slots, pages
        self.max_waiting, self.check_every = max_waiting, check_every
        self.time_slice = time_slice
        self.weights = weights or WeightChanges()
        self.running: dict[int, QueuedRequest] = {}
        self._prefixes = RunningPrefixes(page_size)
        self.quarantine = CrashQuarantine()
        self._waiting: list[QueuedRequest] = []  # by their order
        self.open: dict[int, QueuedRequest] = {}  # waiting, running or being preempted
        self._cancelled: list[int] = []  # for the next round
        self._preempting: dict[int, QueuedRequest] = {}  # preempted by rounds in flight
        self._in_flight: deque[RoundInFlight] = deque()
        self._free, self._held_back = pages, 0  # as of the last reply
        self._arrivals = self._admitted = self._rounds = self._steps = 0
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self.open) - len(self.running)

    def submit(
        self,
        request: Schedulable,
        footprint: Footprint,
        priority: int = 0,
        deadline: float | None = None,
    ) -> None:
        """Queue a request, or raise Overloaded or Poisonous; ignore one that is queued already.

        After a coordinator's death both a request's client and the recovery may submit it.
        """
        if request.uid in self.open:
            return
        if self.quarantine.is_known(request, self._arrivals):
            raise Poisonous(Poisonous.reason)
        behind = sum(each.priority > priority for each in self._waiting)
        if self.waiting - behind >= self.max_waiting + max(self.slots - len(self.running), 0):
            raise Overloaded(
                f"the queue is full ({self.waiting} requests are waiting, "
                f"{len(self.running)} are running); try again later"
            )
        prefixes = self._prefixes.hashes(request, footprint)
        queued = QueuedRequest(request, footprint, priority, deadline, self._arrivals, prefixes)
        if (resume := request.resume) is not None:  # it started on another coordinator
            queued.ids = list(resume.ids)
            queued.progress, queued.forwards = resume.progress, resume.forwards
        self._arrivals += 1
        self.open[queued.uid] = queued
        self._wait(queued)

    def cancel(self, uid: int) -> None:
        """Remove a request, if it is open; the next round frees what it holds."""
        queued = self.open.get(uid)
        if queued is None:
            return
        self.quarantine.forget(queued)
        if uid in self.running:
            self._cancelled.append(uid)
            self._stop(queued)
        elif not self._preempting.pop(uid, None) and queued in self._waiting:
            self._waiting.remove(queued)
        del self.open[uid]  # last, so that an interrupted call can be repeated

    def plan(self, steps: int) -> Round[Any] | None:
        """Return the next round, or None if there is nothing to do."""
        admitted: list[QueuedRequest] = []
        asked = self.weights.restore()
        self._admit(admitted)
        preempting = self._preempt()
        if asked is None and self._may_change():
            asked = self.weights.take()
        if preempting or asked is not None:
            self._admit(admitted)
        if not self.running and not self._cancelled and asked is None:
            return None
        self._rounds += 1
        self._steps += steps
        self._in_flight.append(RoundInFlight(admitted, preempting, steps, asked))
        cancelled, self._cancelled = self._cancelled, []
        return Round(
            number=self._rounds,
            cancel=cancelled,
            add=[queued.request for queued in admitted],
            steps=steps,
            check=self.check_every > 0 and self._rounds % self.check_every == 0,
            change=None if asked is None else asked.change,
        )

    def settle(self, reply: Reply) -> list[Event]:
        """Take a round's reply; return the events of requests that are still open."""
        sent = self._in_flight.popleft()
        self._steps -= sent.steps - reply.steps
        self._free, self._held_back = reply.stats.free_pages, reply.stats.waiting
        if sent.asked is not None:
            self.weights.settle(sent.asked, reply.unchanged)
        for queued in sent.admitted:
            queued.answered = True
        events: list[Event] = []
        for update in reply.updates:
            found = self.running.get(update.uid) or self._preempting.get(update.uid)
            if found is None:
                continue  # cancelled while the round ran
            found.follow(update)
            update.version = self.weights.current.version
            events.append(Event(Kind.UPDATE, update.uid, update))
            if update.finish_reason is not None:
                self._close(found)
        for uid, reason in reply.refused:
            if found := self.running.get(uid):
                self._close(found)
                events.append(Event(Kind.FAILED, uid, reason=reason))
        for queued in sent.preempting:
            if self._preempting.pop(queued.uid, None):
                self._queue_again(queued)
        self.quarantine.settle()
        return events

    def expire(self, now: float) -> list[Event]:
        """Cancel the requests that are past their deadline; return their events."""
        late = [q.uid for q in self.open.values() if q.deadline is not None and q.deadline <= now]
        for uid in late:
            self.cancel(uid)
        return [Event(Kind.LATE, uid) for uid in late]

    def restart(self) -> list[Event]:
        """Queue running requests for a new worker group; return the events of those that fail."""
        ran = [*self.running.values(), *self._preempting.values()]
        guilty, clear = self.quarantine.judge(ran, self._arrivals)
        for queued in ran:
            queued.again()
        for queued in clear:
            self._wait(queued)
        for queued in guilty:
            del self.open[queued.uid]
        self._forget_ranks()
        self.weights.new_ranks()
        return [Event(Kind.POISON, queued.uid, reason=Poisonous.reason) for queued in guilty]

    def start_over(self) -> None:
        """Queue running requests again after an interruption, for which none is to blame."""
        self._forget_ranks()
        waiting = {queued.uid for queued in self._waiting}
        for queued in [each for uid, each in self.open.items() if uid not in waiting]:
            self.quarantine.forget(queued)
            if queued.ended:
                del self.open[queued.uid]
            else:
                queued.again()
                self._wait(queued)

    def fail_all(self, reason: str) -> list[Event]:
        uids = list(self.open)
        self.open.clear()
        self._waiting.clear()
        self.quarantine = CrashQuarantine()
        self._forget_ranks()
        self.weights.fail(reason)
        return [Event(Kind.FAILED, uid, reason=reason) for uid in uids]

    def _forget_ranks(self) -> None:
        self.running.clear()
        self._prefixes.clear()
        self._cancelled.clear()
        self._preempting.clear()
        for asked in [each.asked for each in self._in_flight if each.asked is not None]:
            self.weights.settle(asked, LOST)
        self._in_flight.clear()
        self._free, self._held_back = self.pages, 0

    def _wait(self, queued: QueuedRequest) -> None:
        insort(self._waiting, queued, key=attrgetter("order"))

    def _admit(self, admitted: list[QueuedRequest]) -> None:
        """Admit requests: after a crash first the suspects one by one, then the others."""
        if len(self.running) >= self.slots or self.weights.level:
            return
        free = self._free - sum(sent.pages for sent in self._in_flight)
        free -= sum(queued.taken for queued in admitted)
        for queued in self._next_suspect(free) if self.quarantine else self._next(free):
            self._admitted += 1
            queued.began, queued.began_with = self._steps, len(queued.ids)
            queued.answered = False
            self.running[queued.uid] = queued
            self._prefixes.add(queued)
            admitted.append(queued)

    def _next(self, free: int) -> Iterator[QueuedRequest]:
        """Take requests in order while slots and pages last.

        A request that finds no pages is skipped, but not so often that it starves.
        """
        skipped: list[QueuedRequest] = []
        for queued in self._in_order():
            if len(self.running) >= self.slots:
                return
            if skipped and queued.preempted:
                continue  # it was just preempted for one of those
            if self._lacks_pages(queued, free):
                skipped.append(queued)
                if queued.skipped >= PASSES or len(skipped) > PASSES:
                    return
                continue
            for other in skipped:
                other.skipped += 1
            self._waiting.remove(queued)
            free -= queued.taken
            yield queued

    def _in_order(self) -> Iterator[QueuedRequest]:
        """Yield the waiting requests in order; one of every FIRST_COME is the oldest."""
        held = self.weights.waiting
        queue = [queued for queued in self._waiting if queued.forwards or not held]
        best, oldest = iter(queue), None
        seen: set[int] = set()
        for turn in range(self._admitted + 1, self._admitted + 1 + len(queue)):
            if turn % FIRST_COME == 0 and oldest is None:  # rarely: the queue may be long
                oldest = iter(sorted(queue, key=lambda queued: queued.number))
            candidates = best if turn % FIRST_COME or oldest is None else oldest
            queued = next(queued for queued in candidates if queued.uid not in seen)
            seen.add(queued.uid)
            yield queued

    def _next_suspect(self, free: int) -> Iterator[QueuedRequest]:
        """Take the next suspect of a crash, if none is on trial."""
        quarantine = self.quarantine
        if quarantine.on_trial is None and not self._lacks_pages(quarantine.queue[0], free):
            yield quarantine.try_next()

    def _lacks_pages(self, queued: QueuedRequest, free: int) -> bool:
        """Return whether a request has to wait for pages; alone it always has enough."""
        queued.taken = queued.needs
        if not self.running:
            return False
        if self._held_back > 0:
            return True
        if queued.taken > free:
            queued.taken -= self._prefixes.shared_pages(queued)
        return queued.taken > free

    def _preempt(self) -> list[QueuedRequest]:
        """Preempt requests that restart on new weights, else the longest-running if others wait."""
        if self.weights.waiting and not self.quarantine:
            return [self._give_way(q) for q in self.weights.restarting([*self.running.values()])]
        wait = [*self.quarantine.queue[:1], *self._waiting[:1]]
        needed = (wait or self._held_back) and self.time_slice
        if not needed or self._preempting or self.quarantine.on_trial is not None:
            return []
        # A short request ends turns even if it waits behind long ones, which are admitted first.
        shortest = min((q.missing for q in chain(wait, self._waiting[:NEAR])), default=0)
        able = [
            q for q in self.running.values() if q.answered and self._may_preempt(q, wait, shortest)
        ]
        if not able:
            return []
        queued = min(able, key=lambda each: (-each.priority, each.began))
        queued.preempted += 1
        return [self._give_way(queued)]

    def _give_way(self, queued: QueuedRequest) -> QueuedRequest:
        self._stop(queued)
        self.preemptions += 1
        self._preempting[queued.uid] = queued
        self._cancelled.append(queued.uid)
        return queued

    def _may_change(self) -> bool:
        """Return whether a change waits, and no request has to finish before it."""
        if not self.weights.waiting or self.running or self._preempting or self.quarantine:
            return False
        return not any(queued.forwards for queued in self._waiting)

    def _may_preempt(self, queued: QueuedRequest, wait: list[QueuedRequest], shortest: int) -> bool:
        """Return whether a request has had its turn; `shortest` is the least of those that wait."""
        if any(other.priority > queued.priority for other in wait):
            return False
        turn = self.time_slice * queued.growth
        if wait and all(other.priority < queued.priority for other in wait):
            turn //= SHORT
        elif all(other.preempted >= queued.preempted for other in wait):
            # Among equals, preemption would only make all of them finish later.
            turn = max(turn, min(shortest, LONGEST * self.time_slice))
        # If steps give many tokens, an answer could finish before a turn of steps is over.
        tokens = len(queued.ids) - queued.began_with
        return max(self._steps - queued.began, tokens // TOKENS) >= turn

    def _queue_again(self, queued: QueuedRequest) -> None:
        """Queue a preempted request behind those that wait; for new weights it keeps its place."""
        queued.again()
        if not self.weights.waiting:
            queued.number, self._arrivals = self._arrivals, self._arrivals + 1
        self._wait(queued)

    def _stop(self, queued: QueuedRequest) -> None:
        if self.running.pop(queued.uid, None):
            self._prefixes.remove(queued)

    def _close(self, queued: QueuedRequest) -> None:
        self._stop(queued)
        self._preempting.pop(queued.uid, None)
        del self.open[queued.uid]
        self.quarantine.forget(queued)
