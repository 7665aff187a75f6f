"""What a replica's Ray actors share: names, forced ends, error texts, announcements, restarts."""

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from diffray.cluster.control.engine_client import EngineFailed
from diffray.workers.process import Process, kill

DIED = "died; its node's log may say why (killed, out of memory)"


def actor_name(model: str, group: PlacementGroup, part: str) -> str:
    """Return a unique name that contains the model, the replica and its part.

    Unique, because Ray frees a name only some time after the actor's death.
    """
    # Serve names the group after its replica: SERVE_REPLICA::demo#Replica#x7k2b9qz.
    replica = placement_group_table(group).get("name") or group.id.hex()[:8]
    return f"{short_name(model)} {part} of {replica} ({secrets.token_hex(3)})"


def short_name(model: str) -> str:
    """Return the last part of a model's folder or Hub id."""
    return model.rstrip("/").rpartition("/")[2]


def kill_here(processes: list[Process]) -> None:
    """Kill those of the processes that run on this node: `ray.kill` takes 5 s if one hangs."""
    here = ray.get_runtime_context().get_node_id()
    for process in processes:
        kill(process, here)


def first_line(error: BaseException) -> str:
    """Return a remote error's message as one line, without Ray's traceback before it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        text, name = " ".join(str(cause).split()), type(cause).__name__
        if text and type(cause).__module__.startswith("diffray."):
            return text  # already a sentence
        return f"{name}: {text}" if text else name
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def announce(model: str, text: str) -> None:
    """Write a line to stderr, which Ray shows on the terminal of `diffray serve`."""
    with suppress(OSError):  # a terminal that was closed
        # Not sys.stderr, which Serve sends to a replica's log.
        os.write(2, f"{short_name(model)}: {text}\n".encode())


def continuing(requests: int) -> str:
    return "1 request continues" if requests == 1 else f"{requests} requests continue"


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
