"""How often something may be started again: at once while it works, slower and slower if not."""

from collections import deque

WITHIN_S = 600.0  # restarts are counted over so long
_LONGEST_S = 30.0


class Restarts:
    """The restarts of late, and in all."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._times: deque[float] = deque()
        self._fruitless = 0  # in a row

    @property
    def lately(self) -> int:
        return len(self._times)

    def pause(self, now: float, *, useful: bool) -> float | None:
        """Return the seconds to wait before the next restart, or None: there were too many.

        `useful` is whether what was started last has done anything.
        """
        while self._times and self._times[0] < now - WITHIN_S:
            self._times.popleft()
        if len(self._times) >= self.most:
            return None
        self._times.append(now)
        self.total += 1
        self._fruitless = 0 if useful else self._fruitless + 1
        return float(min(2.0**self._fruitless - 1, _LONGEST_S))
