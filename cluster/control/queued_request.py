"""A request in the coordinator's books: what was asked, how far it has come, what it is owed."""

from dataclasses import dataclass, field, replace

from diffray.workers.messages import BEGINNING, Progress, Resume, Update, WireRequest

LONG = 16  # tokens; for each so many of its own a request lets one later arrival run first ...
LATEST = 64  # ... but no more than so many


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request, passed on as it came, and where it stands if it has to begin again elsewhere."""

    request: WireRequest
    pages: int  # of K/V that its first block needs
    priority: int
    deadline: float | None  # on the coordinator's clock
    number: int  # of its arrival
    most: int = 0  # pages that its last block needs
    ids: list[int] = field(default_factory=list)
    progress: Progress = BEGINNING
    forwards: int = 0
    # Since it was last admitted.
    began: int = 0  # steps that all rounds had made until then
    admitted: float | None = None  # on the coordinator's clock, until its first news
    answered: bool = False  # the ranks have survived the round that admitted it
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
        """How many time slices its next turn has; soft generations begin anew after each."""
        return 1 << self.turns if self.request.is_soft else 1 + self.turns

    @property
    def needs(self) -> int:
        """About how many pages it takes on admission: more, the further it had come elsewhere."""
        growth = max(self.most - self.pages, 0)
        return self.pages + -(-growth * len(self.ids) // self.request.max_tokens)

    def follow(self, update: Update) -> None:
        """Remember an update."""
        self.ids += update.ids
        self.forwards, self.progress = update.forwards, update.progress

    def again(self) -> None:
        """Let the request go on from what it has reported."""
        if self.ids:
            resume = Resume(tuple(self.ids), self.progress, self.forwards)
            self.request = replace(self.request, resume=resume)
