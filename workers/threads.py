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

_SAMPLE: Final = 8  # forwards that are compared, at most ...
_FEW: Final = 3  # ... and at least
_GAIN: Final = 0.97  # of the time, or less: then another number is better
_SOON: Final = 8  # forwards between trials, at least ...
_LATE: Final = 2048  # ... and at most
_CHANGED: Final = 1.5  # times as fast or as slow: then the load of the machine has changed


@dataclass(slots=True)
class Pace:
    """The times of forwards of about one size, divided by their positions."""

    threads: int
    most: int
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLE))
    usual: float = 0.0  # after the last trial; 0: there was none
    trial: int = 0  # the number that is tried now, or 0
    tried: list[float] = field(default_factory=list)
    up: bool = True  # whether the next trial has more threads
    wait: int = _SOON
    left: int = _SOON  # forwards until the next trial

    def note(self, seconds: float) -> None:
        if self.trial:
            self.tried.append(seconds)
            hopeless = min(self.tried) > mean(self.recent) * _CHANGED
            if len(self.tried) >= (_FEW if hopeless else _SAMPLE):
                self._decide()
            return
        self.recent.append(seconds)
        self.left -= 1
        latest = list(self.recent)[-_FEW:]
        slower = min(latest) > self.usual * _CHANGED
        if self.usual and (slower or max(latest) < self.usual / _CHANGED):
            self.recent = deque(latest, _SAMPLE)  # the others were under another load
            self.wait, self.left, self.up = _SOON, 0, not slower
        if self.left <= 0 and len(latest) == _FEW:
            self.trial = self._other()

    def _other(self) -> int:
        """Return half or twice the number of threads, whichever is next and possible."""
        fewer, more = max(self.threads // 2, 1), min(self.threads * 2, self.most)
        if (more if self.up else fewer) == self.threads:
            self.up = not self.up
        return more if self.up else fewer

    def _decide(self) -> None:
        if mean(self.tried) < mean(self.recent) * _GAIN:
            self.threads, self.wait = self.trial, _SOON
            self.recent.extend(self.tried)
        else:
            self.wait = min(self.wait * 4, _LATE)
            self.up = not self.up
        self.trial, self.left, self.usual = 0, self.wait, mean(self.recent)
        self.tried.clear()


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
        torch.set_num_threads(pace.trial or pace.threads)  # takes half a microsecond
        begin = self.clock()
        try:
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
