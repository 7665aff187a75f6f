"""Queued requests, the prefixes of running ones, rounds in flight, requests that crash ranks."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING

from diffray.workers.messages import (
    BEGINNING,
    Footprint,
    Progress,
    Resume,
    Schedulable,
    Update,
)

if TYPE_CHECKING:
    from diffray.cluster.control.weight_changes import AskedChange

LONG = 16  # per this many missing tokens, a request lets one later arrival run first ...
LATEST = 64  # ... but no more than this many


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request as it was submitted, and what is needed to resume it elsewhere."""

    request: Schedulable
    footprint: Footprint
    priority: int
    deadline: float | None  # on the driver's clock
    number: int  # in order of arrival
    prefixes: tuple[int, ...] = ()  # hashes of its prompt's prefixes, if it may share them
    ids: list[int] = field(default_factory=list)
    progress: Progress = BEGINNING
    forwards: int = 0
    ended: bool = False  # whether its last update has arrived
    # Its last admission.
    began: int = 0  # the steps of all rounds until then
    began_with: int = 0  # the tokens that it had
    admitted: float | None = None  # the time; None after its first update
    answered: bool = False  # the ranks have survived the round that admitted it
    taken: int = 0  # pages that its admission was expected to take
    # Fairness.
    preempted: int = 0  # how often it has given way
    skipped: int = 0  # how many later requests ran before it because it found no pages
    # Crashes of the worker group while it ran.
    tokens_at_crash: int | None = None  # at the last one
    no_progress: bool = False  # between the last two
    crashes: int = 0  # that it may have caused

    @property
    def uid(self) -> int:
        return self.request.uid

    @property
    def missing(self) -> int:
        """The tokens that it may still generate."""
        return self.request.max_tokens - len(self.ids)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Lower runs first: by priority, then by how often preempted, then by arrival.

        A long request counts as having arrived later.
        """
        later = min(self.missing // LONG, LATEST)
        return self.priority, self.preempted, self.number + later, self.number

    @property
    def growth(self) -> int:
        """The time slices of its next turn; they double if preemption makes it start over."""
        return 1 << self.preempted if self.request.restarts else 1 + self.preempted

    @property
    def needs(self) -> int:
        """The pages that its admission is expected to take; more if it resumes late in its text."""
        pages, most, _, step = self.footprint
        growth = max(most - pages, 0)
        steps = max(-(-self.request.max_tokens // step) - 1, 1)  # of its growth
        return pages + min(growth, -(-growth * (len(self.ids) // step) // steps))

    def follow(self, update: Update) -> None:
        self.ended = update.finish_reason is not None
        self.ids += update.ids
        self.forwards, self.progress = update.forwards, update.progress

    def again(self) -> None:
        """Resume the request from what it has reported."""
        resume = Resume(tuple(self.ids), self.progress, self.forwards) if self.forwards else None
        self.request = self.request.resumed(resume)


class RunningPrefixes:
    """The prefixes of the running requests' prompts, in whole blocks and whole pages.

    If two prefixes have the same hash, the scheduler counts too few pages for a request, and the
    engine holds it back until there are enough.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._counts: Counter[int] = Counter()

    def hashes(self, request: Schedulable, footprint: Footprint) -> tuple[int, ...]:
        """Return a hash of each prefix of the prompt, from the shortest to the longest.

        Requests share K/V only with others of the same salt, adapter and block length.
        """
        if not footprint.block:
            return ()
        unit, prompt = self._unit(footprint), request.prompt
        last, found = hash((request.cache_salt, request.lora, footprint.block)), []
        for stop in range(unit, len(prompt) + 1, unit):
            last = hash((last, prompt[stop - unit : stop]))
            found.append(last)
        return tuple(found)

    def add(self, queued: QueuedRequest) -> None:
        self._counts.update(queued.prefixes)

    def remove(self, queued: QueuedRequest) -> None:
        for each in queued.prefixes:
            self._counts[each] -= 1
            if self._counts[each] <= 0:
                del self._counts[each]

    def clear(self) -> None:
        self._counts.clear()

    def shared_pages(self, queued: QueuedRequest) -> int:
        """Return how many of a request's pages running requests already hold."""
        counts = self._counts
        # A request with a prefix has all shorter ones.
        shared = bisect_left(queued.prefixes, True, key=lambda each: each not in counts)
        return shared * self._unit(queued.footprint) // self.page_size if shared else 0

    def _unit(self, footprint: Footprint) -> int:
        return lcm(footprint.block, self.page_size)


@dataclass(frozen=True, slots=True)
class RoundInFlight:
    """A round that was sent and has no reply yet."""

    admitted: list[QueuedRequest]
    preempting: list[QueuedRequest]  # requests that will be resumed later
    steps: int  # at most
    asked: "AskedChange | None" = None

    @property
    def pages(self) -> int:
        return sum(queued.taken for queued in self.admitted)


CRASHES = 2  # after this many a request fails, if it ran alone at the last one
_REMEMBERED = 1000  # arrivals during which the same request is refused again


class CrashQuarantine:
    """The suspects of the last crash, and the one on trial."""

    def __init__(self) -> None:
        self.queue: list[QueuedRequest] = []  # suspects, in the order of their trials
        self.on_trial: QueuedRequest | None = None
        self._guilty: dict[int, int] = {}  # the count of arrivals then, by a request's content

    def __bool__(self) -> bool:
        return bool(self.queue) or self.on_trial is not None

    def judge(
        self, running: list[QueuedRequest], arrivals: int
    ) -> tuple[list[QueuedRequest], list[QueuedRequest]]:
        """Sort the requests that ran during a crash; return the guilty and the cleared."""
        guilty: list[QueuedRequest] = []
        clear: list[QueuedRequest] = []
        for queued in running:
            new = queued is self.on_trial or not queued.answered
            queued.no_progress = queued.tokens_at_crash == len(queued.ids)
            queued.crashes = queued.crashes + 1 if new else 0
            queued.tokens_at_crash = len(queued.ids)
            if len(running) == 1 and queued.crashes >= CRASHES:
                guilty.append(queued)
                self._guilty[queued.request.content] = arrivals
            elif queued.crashes or queued.no_progress:
                self.queue.append(queued)
            else:
                clear.append(queued)
        self.on_trial = None
        self.queue.sort(key=lambda queued: (-queued.crashes, queued.order))
        return guilty, clear

    def is_known(self, request: Schedulable, arrivals: int) -> bool:
        """Return whether a request like this one was quarantined recently."""
        if not self._guilty:
            return False
        recent = {c: at for c, at in self._guilty.items() if arrivals - at < _REMEMBERED}
        self._guilty = recent
        return request.content in recent

    def try_next(self) -> QueuedRequest:
        self.on_trial = self.queue.pop(0)
        return self.on_trial

    def settle(self) -> None:
        """End a survived trial: after its first round or, if the request was stuck, progress."""
        queued = self.on_trial
        if queued is None or not queued.answered:
            return
        if queued.no_progress and len(queued.ids) == queued.tokens_at_crash:
            return
        queued.crashes = 0
        self.on_trial = None

    def forget(self, queued: QueuedRequest) -> None:
        if queued is self.on_trial:
            self.on_trial = None
        elif queued in self.queue:
            self.queue.remove(queued)
