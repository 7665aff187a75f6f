"""The weights of a coordinator's ranks, as their replica knows them and asks for others."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from diffray.cluster.control.engine_client import Load
from diffray.cluster.control.weight_changes import InFlight, WeightChanges
from diffray.components.checkpoints.update import Source
from diffray.workers.messages import Change


class RemoteWeights:
    """Remembers the weights for the next coordinator, whose ranks begin with the checkpoint's."""

    def __init__(self) -> None:
        self._weights = WeightChanges()
        self._asked: Change | None = None  # the coordinator may have made it
        self._one = asyncio.Lock()

    @property
    def known(self) -> Change | None:
        """The change that the ranks have made last; None: they have the checkpoint's weights."""
        return self._weights.current if self._weights.current.number else None

    async def update(
        self,
        source: Source,
        in_flight: InFlight,
        version: str | None,
        make: Callable[[Change, InFlight], Awaitable[str]],
    ) -> str:
        """Have a change made, one at a time; return its version."""
        if not isinstance(source, str | Path):
            raise ValueError("the ranks are other processes; give a folder that all of them read")
        async with self._one:
            change = self._weights.next(version, str(source))
            # A coordinator takes those of one number for the same, also after it refused one.
            change = self._asked = replace(change, number=time.time_ns())
            try:
                reason = await make(change, in_flight)
            finally:
                self._asked = None
            if reason:
                raise ValueError(reason)
            self._has(change)
        return change.version

    def heard(self, version: str) -> None:
        """Take an answer's version: the change is made, even if its coordinator never says so."""
        if self._asked is not None and self._asked.version == version:
            self._has(self._asked)

    def shown_in(self, load: Load) -> Load:
        """Return the load with counts that outlive coordinators."""
        version = self._weights.current.version
        return replace(load, weight_updates=self._weights.made, weights_version=version)

    def _has(self, change: Change) -> None:
        if self._weights.current != change:
            self._weights.current, self._weights.made = change, self._weights.made + 1
