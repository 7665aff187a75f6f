"""The weights and the sleep of an engine, and those it is to have: which requests they wait for."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from diffray.cluster.control.queued_request import QueuedRequest
from diffray.workers.messages import AWAKE, WITHOUT_KV, WITHOUT_WEIGHTS, Change

InFlight = Literal["finish", "restart"]
MODES: Final[tuple[str, ...]] = get_args(InFlight)

LOST: Final = "the engine was lost while it took the new weights; it has the old ones, try again"


@dataclass(frozen=True, slots=True, eq=False)
class AskedChange:
    """New weights or a sleep that wait for requests; `done` gets the reason of a refusal, or ""."""

    change: Change
    in_flight: InFlight
    done: Callable[[str], object]


def check_level(level: int) -> None:
    if level not in (WITHOUT_KV, WITHOUT_WEIGHTS):
        raise ValueError(f"level is {level!r}; 1 gives the K/V memory back, 2 the weights' too")


def already(version: str | None) -> str:
    return f"the weights are of version {version} already; name another one"


class WeightChanges:
    """The current weights, and the changes asked for, in their order.

    While one waits, only requests that have reported something are admitted: they end on the
    weights they began with. When none is left the change is made, and the others run on the new
    weights. Under "restart" a running request that has reported nothing starts over on them. A
    sleep waits in the same way; requests that come while the engine is asleep wait until it wakes.
    """

    def __init__(self, current: Change | None = None) -> None:
        self.current = current or Change()
        self.made = 0  # changes since the start of this process
        self._asked: deque[AskedChange] = deque()
        self._lacking = current is not None  # whether the ranks have to be given `current`

    @property
    def waiting(self) -> bool:
        return bool(self._asked)

    @property
    def level(self) -> int:
        """How deep the engine sleeps; 0: it is awake."""
        return self.current.level or AWAKE

    def next(self, version: str | None, source: str = "") -> Change:
        """Return the change after all others; versions that are not named count up."""
        if version == self.current.version:
            raise ValueError(already(version))
        named = [asked for asked in self._asked if asked.change.level is None]
        return Change(self._number, version or str(self.made + len(named) + 1), source)

    def next_sleep(self, level: int) -> Change:
        """Return the change to this level of sleep, after all others."""
        return Change(self._number, level=level)

    @property
    def _number(self) -> int:
        before = [self.current, *(asked.change for asked in self._asked)]
        return max(change.number for change in before) + 1

    def ask(
        self, change: Change, in_flight: InFlight, done: Callable[[str], object]
    ) -> AskedChange:
        """Queue a change."""
        if in_flight not in MODES:
            raise ValueError(f"in_flight is {in_flight!r}; allowed are {', '.join(MODES)}")
        asked = AskedChange(change, in_flight, done)
        self._asked.append(asked)
        return asked

    def withdraw(self, asked: AskedChange) -> None:
        """Forget a change that has not begun."""
        if asked in self._asked:
            self._asked.remove(asked)

    def restarting(self, running: Iterable[QueuedRequest]) -> list[QueuedRequest]:
        """Return the running requests that start over on the new weights."""
        if not self._asked or self._asked[0].in_flight == "finish":
            return []
        return [queued for queued in running if not queued.forwards]

    def restore(self) -> AskedChange | None:
        """Return what new ranks need before anything else."""
        if not self._lacking:
            return None
        self._lacking = False
        return AskedChange(replace(self.current, restores=True), "finish", lambda _: None)

    def take(self) -> AskedChange:
        return self._asked.popleft()

    def settle(self, asked: AskedChange, refusal: str) -> None:
        """Note what became of a change that the ranks were given."""
        if not refusal and not asked.change.restores:
            self.has(asked.change)
        asked.done(refusal)

    def has(self, change: Change) -> None:
        """Note a change that was made."""
        if change.level is not None:
            self.current = replace(self.current, number=change.number, level=change.level)
        else:
            self.current, self.made = replace(change, level=self.level), self.made + 1

    def new_ranks(self) -> None:
        """Give the next ranks the current weights: they begin with those of the checkpoint."""
        self._lacking = self.current.number > 0

    def fail(self, reason: str) -> None:
        while self._asked:
            self._asked.popleft().done(reason)
