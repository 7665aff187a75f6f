"""Restarts ranks or a coordinator: immediately while that helps, else after growing pauses."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from diffray.cluster.control.engine_client import EngineFailed

log = logging.getLogger(__name__)

WITHIN_S = 600.0  # the window in which restarts are counted
_LONGEST_S = 30.0  # the longest pause
_SHORTEST_START_S = 5.0  # before this a start is never overdue


class Restarts:
    """Counts restarts, recent and total, and paces them."""

    def __init__(self, name: str, most: int) -> None:
        self.name, self.most = name, most
        self.total = 0
        self._times: deque[float] = deque()
        self._fruitless = 0  # restarts in a row
        self._first_start_s = 0.0
        self._lost_at: float | None = None

    async def start(self, start: Callable[[], Awaitable[None]]) -> None:
        """Call `start`, and note how long it took."""
        begin = time.monotonic()
        await start()
        self.started(time.monotonic() - begin)

    async def restart(
        self, start: Callable[[], Awaitable[None]], reason: str, *, useful: bool
    ) -> str | None:
        """Restart until that succeeds; after too many failures, return why to give up.

        `useful` is whether the last start led to any work.
        """
        while True:
            pause = self.pause(time.monotonic(), useful=useful)
            if pause is None:
                return (
                    f"{self.name} failed {len(self._times) + 1} times within {WITHIN_S / 60:g} "
                    f"minutes (max_restarts); the last time: {reason}"
                )
            await asyncio.sleep(pause)
            try:
                await self.start(start)
                return None
            except EngineFailed as error:
                reason, useful = str(error), False
                log.error("%s failed again: %s", self.name, reason)

    def started(self, took: float) -> None:
        if self._lost_at is None:
            self._first_start_s = took
        self._lost_at = None

    def overdue(self, now: float) -> str | None:
        """Return why to refuse new requests, if a restart takes longer than the first start."""
        if self._lost_at is None:
            return None
        away = now - self._lost_at
        if away <= max(self._first_start_s, _SHORTEST_START_S):
            return None
        return (
            f"{self.name} failed {away:.0f} s ago and could not be restarted yet (its node's "
            "log may say why); try again"
        )

    def pause(self, now: float, *, useful: bool) -> float | None:
        """Return the seconds to wait before the next restart; None after too many."""
        self._lost_at = now if self._lost_at is None else self._lost_at
        while self._times and self._times[0] < now - WITHIN_S:
            self._times.popleft()
        if len(self._times) >= self.most:
            return None
        self._times.append(now)
        self.total += 1
        self._fruitless = 0 if useful else self._fruitless + 1
        return float(min(2.0**self._fruitless - 1, _LONGEST_S))
