"""A process that gives no sign of life for `heartbeat_timeout_s` is taken for hung.

Slow work does not count: heartbeats come from a thread or an event loop that does nothing else for
long. Silence is counted in looks instead of by the clock, because a watcher that was stopped itself
has heard nobody meanwhile.
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
    """Return what the coordinator answers; raises TimeoutError where it hangs."""
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
    """Say why a process is taken for hung."""
    return (
        f"{name} has given no sign of life for {timeout:g} s (heartbeat_timeout_s) and is taken "
        "for hung"
    )


def _tell(name: str, looks: int, timeout: float) -> None:
    log.warning(
        "%s was silent for %.1f s; after %g s (heartbeat_timeout_s) it is taken for hung",
        name,
        looks * timeout / _LOOKS,
        timeout,
    )
