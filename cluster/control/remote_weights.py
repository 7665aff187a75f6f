"""The weights and sleep level of a coordinator's ranks, as their replica tracks them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from diffray.cluster.control.engine_client import Load
from diffray.cluster.control.weight_changes import (
    EngineChange,
    InFlight,
    UpdateWeights,
    WeightChanges,
)
from diffray.workers.messages import Change

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
