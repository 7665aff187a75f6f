"""The weights and the sleep of a coordinator's ranks, as their replica knows and changes them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from diffray.cluster.control.engine_client import Load
from diffray.cluster.control.weight_changes import InFlight, WeightChanges
from diffray.components.checkpoints.update import Source
from diffray.workers.messages import Change

Make = Callable[[Change, InFlight], Awaitable[str]]  # has a coordinator do it; returns why not


class RemoteWeights:
    """Remembers the weights for the next coordinator, whose ranks begin with the checkpoint's."""

    def __init__(self) -> None:
        self._weights = WeightChanges()
        self._asked: Change | None = None  # the coordinator may have made it
        self._one = asyncio.Lock()

    @property
    def known(self) -> Change | None:
        """What the ranks have; None: the checkpoint's weights, and they are awake."""
        return self._weights.current if self._weights.current.number else None

    @property
    def level(self) -> int:
        return self._weights.level

    async def update(
        self,
        source: Source,
        in_flight: InFlight,
        version: str | None,
        make: Make,
    ) -> str:
        """Have a change made, one at a time; return its version."""
        if not isinstance(source, str | Path):
            raise ValueError("the ranks are other processes; give a folder that all of them read")
        async with self._one:
            change = self._weights.next(version, str(source))
            return (await self._made(change, in_flight, make)).version

    async def sleep(self, level: int, make: Make) -> None:
        """Bring the ranks to a level of sleep, 0 to awake."""
        async with self._one:
            await self._made(self._weights.next_sleep(level), "finish", make)

    async def _made(self, change: Change, in_flight: InFlight, make: Make) -> Change:
        # A coordinator takes those of one number for the same, also after it refused one.
        change = self._asked = replace(change, number=time.time_ns())
        try:
            reason = await make(change, in_flight)
        finally:
            self._asked = None
        if reason:
            raise ValueError(reason)
        self._has(change)
        return change

    def heard(self, version: str) -> None:
        """Take an answer's version: the change is made, even if its coordinator never says so."""
        asked = self._asked
        if asked is not None and asked.level is None and asked.version == version:
            self._has(asked)

    def shown_in(self, load: Load) -> Load:
        """Return the load with counts that outlive coordinators."""
        weights = self._weights
        version = weights.current.version
        return replace(
            load,
            weight_updates=weights.made,
            weights_version=version,
            sleep_level=weights.level,
        )

    def _has(self, change: Change) -> None:
        if self._weights.current.number != change.number:
            self._weights.has(change)
