"""A request in the scheduler's queue, and its progress."""

from dataclasses import dataclass, field

from diffray.workers.messages import (
    BEGINNING,
    Footprint,
    Progress,
    Resume,
    Schedulable,
    Update,
)

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
