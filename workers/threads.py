"""Chooses how many threads compute a forward, by trying.

With more threads a forward takes less time on an idle machine, and more beside other processes:
each operation waits for the last of its threads, which may be waiting for a core. The number hardly
matters to the results: torch splits few sums between threads, which then round in another order.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean as mean
from typing import Final

import torch

_SAMPLE: Final = 8  # forwards that are compared with as many, at most ...
_FEW: Final = 3  # ... and at least
_GAIN: Final = 0.97  # of the time, or less: then another number is better
_SOON: Final = 8  # forwards between trials, at least ...
_LATE: Final = 2048  # ... and at most
_CHANGED: Final = 1.5  # times as fast or as slow: then the load of the machine may have changed
_REST: Final = 64  # forwards after a trial in which such a change begins no other


@dataclass(slots=True)
class Pace:
    """The times of forwards of about one size, divided by their positions."""

    threads: int
    most: int
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_FEW))
    usual: float = 0.0  # in the last trial; 0: there was none
    trial: int = 0  # the number that takes turns with `threads` now, or 0
    tried: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)  # with `threads`, in turn
    up: bool = True  # whether the next trial has more threads
    wait: int = _SOON  # forwards between the last trial and the next
    since: int = 0  # forwards since the last trial

    @property
    def now(self) -> int:
        """The number for the next forward."""
        return self.trial if self.trial and self._tries else self.threads

    @property
    def _tries(self) -> bool:
        """Whether it is the turn of the number on trial."""
        return len(self.tried) <= len(self.kept)

    def note(self, seconds: float) -> None:
        if self.trial:
            (self.tried if self._tries else self.kept).append(seconds)
            if len(self.tried) == len(self.kept):
                self._compare()
            return
        self.latest.append(seconds)
        self.since += 1
        if len(self.latest) < _FEW:
            return
        slower = min(self.latest) > self.usual * _CHANGED
        changed = slower or max(self.latest) < self.usual / _CHANGED
        if self.usual and changed and self.since >= _REST:
            self.up = not slower
            self.trial = self._other()
        elif self.since >= self.wait:
            self.trial = self._other()

    def _other(self) -> int:
        """Return half or twice the number of threads, whichever is next and possible."""
        fewer, more = max(self.threads // 2, 1), min(self.threads * 2, self.most)
        if (more if self.up else fewer) == self.threads:
            self.up = not self.up
        return more if self.up else fewer

    def _compare(self) -> None:
        """End the trial if enough is known; the first forwards compile, and do not count."""
        tried, kept = self.tried[1:], self.kept[1:]
        if len(tried) < _FEW:
            return
        clear = min(tried) > max(kept) * _CHANGED or min(kept) > max(tried) * _CHANGED
        if len(tried) < _SAMPLE and not clear:
            return
        if mean(tried) < mean(kept) * _GAIN:
            self.threads, self.wait, self.usual = self.trial, _SOON, mean(tried)
        else:
            self.up, self.wait, self.usual = not self.up, min(self.wait * 4, _LATE), mean(kept)
        self.trial = self.since = 0
        for times in (self.tried, self.kept, self.latest):
            times.clear()


class Threads:
    """Keeps the fastest number of threads for each size of forward, from 1 to `most`.

    It begins with `start`. `overhead` is the fixed cost of a forward, as a number of positions.
    """

    def __init__(
        self,
        start: int,
        most: int,
        overhead: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.start, self.most, self.overhead, self.clock = start, most, overhead, clock
        self.paces: dict[int, Pace] = {}  # by the size's number of bits

    @contextmanager
    def forward(self, positions: int) -> Iterator[None]:
        """Run a forward of this many positions in the block, and note its time."""
        pace = self._pace(positions.bit_length())
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(min(pace.now, before))  # takes half a microsecond
            begin = self.clock()
            yield
            pace.note((self.clock() - begin) / (self.overhead + positions))
        finally:
            torch.set_num_threads(before)

    def _pace(self, size: int) -> Pace:
        """Return the pace of this size; a new one begins with the threads of the nearest size."""
        if size not in self.paces:
            nearest = min(self.paces, key=lambda other: abs(other - size), default=None)
            threads = self.start if nearest is None else self.paces[nearest].threads
            self.paces[size] = Pace(threads, self.most)
        return self.paces[size]
