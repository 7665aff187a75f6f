"""Limits restarts: immediate while they help, with growing pauses while they do not."""

from collections import deque

WITHIN_S = 600.0  # the window in which restarts are counted
_LONGEST_S = 30.0
_SOON_S = 5.0  # a start takes as long at least


class Restarts:
    """Counts restarts, recent and total."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._times: deque[float] = deque()
        self._fruitless = 0  # in a row
        self._usual = 0.0  # seconds that the first start took
        self._lost: float | None = None  # when it went down

    @property
    def lately(self) -> int:
        return len(self._times)

    def started(self, took: float) -> None:
        """Note that it is up (again)."""
        if self._lost is None:
            self._usual = took
        self._lost = None

    def overdue(self, now: float) -> float | None:
        """Return how long it has been down, if that is longer than a start should take."""
        if self._lost is None or now - self._lost <= max(self._usual, _SOON_S):
            return None
        return now - self._lost

    def pause(self, now: float, *, useful: bool) -> float | None:
        """Return the seconds to wait before the next restart, or None: there were too many.

        `useful` is whether what was started last has done anything.
        """
        self._lost = now if self._lost is None else self._lost
        while self._times and self._times[0] < now - WITHIN_S:
            self._times.popleft()
        if len(self._times) >= self.most:
            return None
        self._times.append(now)
        self.total += 1
        self._fruitless = 0 if useful else self._fruitless + 1
        return float(min(2.0**self._fruitless - 1, _LONGEST_S))


def not_back(name: str, away: float) -> str:
    """Say why a new request is refused while a restart takes too long."""
    return (
        f"{name} were lost {away:.0f} s ago and could not be started again yet (the log of their "
        "node may say why); try again"
    )
