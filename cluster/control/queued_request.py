"""A request in the scheduler's queue: what was asked, and how far it has come."""

from dataclasses import dataclass, field

from diffray.workers.messages import (
    BEGINNING,
    Footprint,
    Progress,
    Resume,
    Schedulable,
    Update,
)

LONG = 16  # tokens; for each so many of its own a request lets one later arrival run first ...
LATEST = 64  # ... but no more than so many


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request as it was submitted, and what it takes to resume it elsewhere."""

    request: Schedulable
    footprint: Footprint
    priority: int
    deadline: float | None  # on the clock of whoever drives the scheduler
    number: int  # of its arrival
    ids: list[int] = field(default_factory=list)
    progress: Progress = BEGINNING
    forwards: int = 0
    # Since it was last admitted.
    began: int = 0  # steps that all rounds had made until then
    admitted: float | None = None  # when; until its first update
    answered: bool = False  # the ranks have survived the round that admitted it
    taken: int = 0  # pages that its admission was expected to take
    # Fairness.
    turns: int = 0  # how often it has given way
    passed: int = 0  # how many have run before it because it found no pages
    # Losses of the ranks.
    stood: int | None = None  # its tokens at the last one that it took part in
    stuck: bool = False  # that one found it where the one before had
    strikes: int = 0  # losses that may be its own doing

    @property
    def uid(self) -> int:
        return self.request.uid

    @property
    def missing(self) -> int:
        """Tokens asked for and not yet there."""
        return self.request.max_tokens - len(self.ids)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Lower runs first: by priority, then who has had fewer turns, then as they came.

        A long one counts as having come later.
        """
        later = min(self.missing // LONG, LATEST)
        return self.priority, self.turns, self.number + later, self.number

    @property
    def growth(self) -> int:
        """How many time slices its next turn has; twice as many where it has to start over."""
        return 1 << self.turns if self.request.restarts else 1 + self.turns

    @property
    def needs(self) -> int:
        """Estimate the pages its admission takes: more, the further it had come elsewhere."""
        pages, most, _ = self.footprint
        growth = max(most - pages, 0)
        return pages + -(-growth * len(self.ids) // self.request.max_tokens)

    def shared_tokens(self, other: "QueuedRequest", unit: int) -> int:
        """Return how many of its first tokens, in whole units, have the same K/V as the other's."""
        mine, its = self.request, other.request
        if mine.cache_salt != its.cache_salt or self.footprint.block != other.footprint.block:
            return 0
        end = min(len(mine.prompt), len(its.prompt)) // unit * unit
        same, step = 0, unit
        while same < end and step:  # steps double as long as all is equal, and then shrink again
            stop = min(same + step, end)
            if mine.prompt[same:stop] == its.prompt[same:stop]:
                same, step = stop, 2 * step
            else:
                end = stop - unit
                step = (end - same) // (2 * unit) * unit or min(unit, end - same)
        return same

    def follow(self, update: Update) -> None:
        """Remember an update."""
        self.ids += update.ids
        self.forwards, self.progress = update.forwards, update.progress

    def again(self) -> None:
        """Have the request resumed from what it has reported."""
        if self.ids:
            resume = Resume(tuple(self.ids), self.progress, self.forwards)
            self.request = self.request.resumed(resume)
