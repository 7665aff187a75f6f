"""An engine's weights and sleep level, and the changes that wait for requests to finish."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal, get_args

from diffray.cluster.control.engine_client import Load
from diffray.cluster.control.request_queue import QueuedRequest
from diffray.workers.messages import AWAKE, WITHOUT_KV, WITHOUT_WEIGHTS, Change

if TYPE_CHECKING:
    from diffray.components.checkpoints.update import Source  # imports torch

InFlight = Literal["finish", "restart"]
MODES: Final[tuple[str, ...]] = get_args(InFlight)

LOST: Final = "the engine was lost while it loaded the new weights; it has the old ones, try again"


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Replace the weights: by a folder or Hub id or, in the engine's process, by tensors.

    Without a `version` they count up.
    """

    source: "Source"
    in_flight: InFlight = "finish"
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free memory until woken with level 0.

    Requests that have started finish first; those that arrive meanwhile wait.
    """

    level: int
    in_flight: ClassVar[InFlight] = "finish"


EngineChange = UpdateWeights | Sleep


@dataclass(frozen=True, slots=True, eq=False)
class AskedChange:
    """A change that waits for requests; `done` gets the reason for a refusal, or ""."""

    change: Change
    in_flight: InFlight
    done: Callable[[str], object]


def check_level(level: int) -> None:
    if level not in (WITHOUT_KV, WITHOUT_WEIGHTS):
        raise ValueError(f"level is {level!r}; 1 frees the K/V memory, 2 the weights' too")


def already(version: str | None) -> str:
    return f"the weights already have version {version}; choose another"


class WeightChanges:
    """The current weights, and a queue of changes.

    While a change waits, only requests that have reported something are admitted: they finish on
    the weights that they started with. When none is left, the change is made, and the others run on
    the new weights. With "restart", a running request that has reported nothing starts over on
    them. Sleep waits in the same way; requests that arrive during sleep wait for its end.
    """

    def __init__(self, current: Change | None = None) -> None:
        self.current = current or Change()
        self.made = 0  # changes of the weights since this process started
        self._asked: deque[AskedChange] = deque()
        self._lacking = current is not None  # whether the ranks still need `current`

    @property
    def waiting(self) -> bool:
        return bool(self._asked)

    @property
    def level(self) -> int:
        """The engine's sleep level; 0: awake."""
        return self.current.level or AWAKE

    def next(self, wanted: EngineChange) -> Change:
        """Return a change to follow all others."""
        before = [self.current, *(asked.change for asked in self._asked)]
        number = max(change.number for change in before) + 1
        if isinstance(wanted, Sleep):
            return Change(number, self.current.version, level=wanted.level)
        if wanted.version == self.current.version:
            raise ValueError(already(wanted.version))
        named = [asked for asked in self._asked if asked.change.level is None]
        source = str(wanted.source) if isinstance(wanted.source, str | Path) else ""
        return Change(number, wanted.version or str(self.made + len(named) + 1), source)

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
        """Drop a change that has not started."""
        if asked in self._asked:
            self._asked.remove(asked)

    def restarting(self, running: Iterable[QueuedRequest]) -> list[QueuedRequest]:
        """Return the running requests that start over on the new weights."""
        if not self._asked or self._asked[0].in_flight == "finish":
            return []
        return [queued for queued in running if not queued.forwards]

    def restore(self) -> AskedChange | None:
        """Return the change that new ranks need before anything else."""
        if not self._lacking:
            return None
        self._lacking = False
        return AskedChange(replace(self.current, restores=True), "finish", lambda _: None)

    def take(self) -> AskedChange:
        return self._asked.popleft()

    def settle(self, asked: AskedChange, refusal: str) -> None:
        """Record the outcome of a change that was sent to the ranks."""
        if not refusal and not asked.change.restores:
            self.has(asked.change)
        asked.done(refusal)

    def has(self, change: Change) -> None:
        """Record a change that was made."""
        if change.level is not None:
            self.current = replace(self.current, number=change.number, level=change.level)
        else:
            self.current, self.made = replace(change, level=self.level), self.made + 1

    def new_ranks(self) -> None:
        """Have new ranks load the current weights, as they start with the checkpoint's."""
        self._lacking = self.current.number > 0

    def fail(self, reason: str) -> None:
        while self._asked:
            self._asked.popleft().done(reason)


Make = Callable[[Change, InFlight], Awaitable[str]]  # asks a coordinator; returns why it refused


class RemoteWeights:
    """Remembers the weights for the next coordinator, whose ranks start with the checkpoint's."""

    def __init__(self) -> None:
        self._weights = WeightChanges()
        self._asked: Change | None = None  # a change that the coordinator may have made
        self._lock = asyncio.Lock()

    @property
    def known(self) -> Change | None:
        """The last change of the ranks; None: they are awake with the checkpoint's weights."""
        return self._weights.current if self._weights.current.number else None

    @property
    def level(self) -> int:
        return self._weights.level

    async def apply(self, wanted: EngineChange, make: Make) -> str:
        """Have the coordinator make a change; return the weights' version."""
        if isinstance(wanted, UpdateWeights) and not isinstance(wanted.source, str | Path):
            raise ValueError(
                "the ranks are other processes; give a folder that all of them can read"
            )
        async with self._lock:
            # A new number, because a coordinator never repeats a change, even one that it refused.
            change = replace(self._weights.next(wanted), number=time.time_ns())
            self._asked = change
            try:
                reason = await make(change, wanted.in_flight)
            finally:
                self._asked = None
            if reason:
                raise ValueError(reason)
            self._record(change)
            return change.version

    def heard(self, version: str) -> None:
        """Take an answer's version: it proves that a change was made, even without a reply."""
        asked = self._asked
        if asked is not None and asked.level is None and asked.version == version:
            self._record(asked)

    def shown_in(self, load: Load) -> Load:
        """Return the load with the weights and sleep level, which outlive coordinators."""
        weights = self._weights
        version = weights.current.version
        return replace(
            load,
            weight_updates=weights.made,
            weights_version=version,
            sleep_level=weights.level,
        )

    def _record(self, change: Change) -> None:
        if self._weights.current.number != change.number:
            self._weights.has(change)
