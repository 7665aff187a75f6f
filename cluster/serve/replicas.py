"""Calls a method of all replicas of a deployment at once."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from diffray.cluster.api.errors import Json
from diffray.cluster.control.engine_client import Load

log = logging.getLogger("ray.serve")

_ANSWER_S = 8.0  # for replicas to answer


@dataclass(frozen=True, slots=True)
class About:
    """A replica's models, load and health."""

    models: list[Json]  # its model and LoRA adapters, as in /v1/models
    load: Load
    failure: str  # why it cannot answer requests, if so


class Replicas:
    """All running replicas of the deployment behind a handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._known: dict[str, list[Any]] = {}  # by the method

    async def look(self, method: str) -> list[Any]:
        """Return what each replica reports; as last known while one hangs."""
        if (found := await self.ask(method)) is not None:
            self._known[method] = found
        return self._known.get(method, [])

    async def ask(self, method: str, *given: object, within: float = _ANSWER_S) -> list[Any] | None:
        """Call a method of every replica; return the results, or None if one is late.

        It starts no replica, even if none is running.
        """
        try:
            async with asyncio.timeout(within):
                # The first call connects the handle and waits for Serve's controller.
                response = await asyncio.to_thread(self._handle.broadcast, method, *given)
                answers = await response.results_async(return_exceptions=True)
        except Exception as error:
            log.warning("the replicas of %s do not answer: %s", self._handle.app_name, error)
            return None
        return [each for each in answers if not isinstance(each, BaseException)]
