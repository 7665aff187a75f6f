"""Heartbeats: a process that sends none for `heartbeat_timeout_s` is assumed hung.

They come from a thread or an event loop of their own, so slow work does not delay them. The watcher
counts its polls instead of reading the clock, because a watcher that was suspended heard nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

log = logging.getLogger(__name__)

BEATS = 6  # heartbeats within the timeout
_LOOKS = 4 * BEATS
_LONG = _LOOKS // 3  # from here on silence is logged

T = TypeVar("T")


class Pulse:
    """The heartbeats of another process."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name, self.timeout = name, timeout
        self._looks = 0  # since the last heartbeat

    def beat(self) -> None:
        if self._looks > _LONG:
            _tell(self.name, self._looks, self.timeout)
        self._looks = 0

    async def stops(self) -> None:
        """Wait until there has been no heartbeat for the timeout."""
        while self._looks < _LOOKS:
            await asyncio.sleep(self.timeout / _LOOKS)
            self._looks += 1


async def answered(call: Awaitable[T], timeout: float) -> T:
    """Return the coordinator's answer; raises TimeoutError if it hangs."""
    answer = asyncio.ensure_future(call)
    try:
        for look in range(_LOOKS):
            if (await asyncio.wait([answer], timeout=timeout / _LOOKS))[0]:
                if look > _LONG:
                    _tell("the coordinator", look, timeout)
                return await answer
        raise TimeoutError(no_sign("it", timeout))
    finally:
        answer.cancel()


def no_sign(name: str, timeout: float) -> str:
    """Say why a process is assumed hung."""
    return f"{name} sent no heartbeat for {timeout:g} s (heartbeat_timeout_s); assumed hung"


def _tell(name: str, looks: int, timeout: float) -> None:
    log.warning(
        "%s was silent for %.1f s; after %g s (heartbeat_timeout_s) it is assumed hung",
        name,
        looks * timeout / _LOOKS,
        timeout,
    )
