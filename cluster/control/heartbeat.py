"""Heartbeats: a process that sends none for `heartbeat_timeout_s` is assumed hung.

They come from a separate thread or event loop, so slow work does not delay them. The watcher counts
its polls instead of reading the clock, because a watcher that was suspended heard nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

log = logging.getLogger(__name__)

BEATS = 6  # heartbeats within the timeout
LOADING = 10  # times the timeout while a process imports or loads, which may hold Python's lock
_POLLS = 4 * BEATS
_LONG = _POLLS // 3  # polls after which silence is logged

T = TypeVar("T")


class Pulse:
    """The heartbeats of another process."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name, self.timeout = name, timeout
        self._polls = 0  # since the last heartbeat

    def beat(self) -> None:
        if self._polls > _LONG:
            log.warning(
                "%s was silent for %.1f s; after %g s (heartbeat_timeout_s) it is assumed hung",
                self.name, self._polls * self.timeout / _POLLS, self.timeout,
            )  # fmt: skip
        self._polls = 0

    async def stops(self) -> None:
        """Wait until there has been no heartbeat for the timeout."""
        while self._polls < _POLLS:
            await asyncio.sleep(self.timeout / _POLLS)
            self._polls += 1


async def answered(call: Awaitable[T], timeout: float) -> T:
    """Return the coordinator's answer; raise TimeoutError if it hangs."""
    pulse = Pulse("the coordinator", timeout)
    answer, silence = asyncio.ensure_future(call), asyncio.create_task(pulse.stops())
    try:
        await asyncio.wait([answer, silence], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise TimeoutError(no_sign(pulse.name, timeout))
        pulse.beat()
        return await answer
    finally:
        answer.cancel()
        silence.cancel()


def no_sign(name: str, timeout: float) -> str:
    return f"{name} sent no heartbeat for {timeout:g} s (heartbeat_timeout_s); assumed hung"
