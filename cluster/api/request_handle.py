"""One request in progress: its tokens as they become final, its state, its result."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from diffray.cluster.frontend.output import Accepted, Delta, Followed, RequestOutput
from diffray.components.config import counted


class Phase(StrEnum):
    QUEUED = "queued"
    DENOISING = "denoising"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Status:
    """The progress of a request; with several choices, that of the slowest.

    It is `queued` until it has final tokens, which may take all steps of its first block.
    """

    phase: Phase
    block: int = 0  # the one being denoised, counted from 1; 0 if there is none
    num_blocks: int = 0  # that max_tokens has room for; a growing canvas may end before

    def __str__(self) -> str:
        if self.phase != Phase.DENOISING:
            return str(self.phase)
        return f"{self.phase}, block {self.block} of {self.num_blocks}"


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The work and time of a request so far; times are in seconds, measured in this process."""

    prompt_tokens: int
    completion_tokens: int
    forwards: int
    queued: float  # until its first forward was reported
    seconds: float  # since it was submitted, until it ended

    @property
    def tokens_per_forward(self) -> float:
        return self.completion_tokens / max(self.forwards, 1)


class RequestCancelled(Exception):
    """Raised instead of the result of a cancelled request."""


class RequestHandle:
    """A submitted request, for coroutines of one event loop; it runs whether or not it is read."""

    def __init__(self, accepted: Accepted, source: AsyncGenerator[Followed, None]) -> None:
        self._accepted = accepted
        self._unread: deque[Delta] = deque()
        self._news = asyncio.Event()  # a delta is unread, or no more will come
        self._latest: dict[int, Delta] = {}  # of each choice
        self._tokens = 0
        self._output: RequestOutput | None = None
        self._failure: BaseException | None = None
        self._began, self._first, self._ended = time.monotonic(), 0.0, 0.0
        self._source = source
        self._task = asyncio.create_task(self._follow())
        self._task.add_done_callback(self._end)

    def __repr__(self) -> str:
        return f"RequestHandle({self.status}, {counted(self._tokens, 'token')})"

    # Deltas.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if (delta := await self.get()) is None:
            raise StopAsyncIteration
        return delta

    async def get(self, timeout: float | None = None) -> Delta | None:
        """Wait for the next delta; None means that the request has ended.

        Raises TimeoutError after `timeout` seconds, and the error of a failed request.
        """
        async with asyncio.timeout(timeout):
            await self._news.wait()
        return self.get_nowait()

    def get_nowait(self) -> Delta | None:
        """Return the next delta, or None if there is nothing new."""
        if self._unread:
            delta = self._unread.popleft()
            if not self._unread and not self._ended:
                self._news.clear()
            return delta
        if self._failure is not None:
            raise self._failure
        return None

    # The request.

    @property
    def status(self) -> Status:
        total = max(self._accepted.num_blocks)
        if self._output is not None:
            return Status(Phase.FINISHED, total, total)
        if self._ended:
            return Status(Phase.FAILED if self._failure else Phase.CANCELLED, 0, total)
        if not self._latest:
            return Status(Phase.QUEUED, 0, total)
        running = []
        for index, count in enumerate(self._accepted.num_blocks):
            latest = self._latest.get(index)
            if latest is None or latest.finish_reason is None:
                running.append((latest.blocks if latest else 0, count))
        done, total = min(running, default=(total, total))
        return Status(Phase.DENOISING, min(done + 1, total), total)

    def stats(self) -> RequestStats:
        now = self._ended or time.monotonic()
        return RequestStats(
            prompt_tokens=self._accepted.prompt_tokens,
            completion_tokens=self._tokens,
            forwards=sum(delta.forwards for delta in self._latest.values()),
            queued=(self._first or now) - self._began,
            seconds=now - self._began,
        )

    async def result(self) -> RequestOutput:
        """Wait for the whole answer, whether or not its deltas were read.

        Raises RequestCancelled, or the error of a failed request.
        """
        await asyncio.wait([self._task])
        if self._output is not None:
            return self._output
        raise self._failure or RequestCancelled("the request was cancelled")

    async def cancel(self) -> None:
        """Cancel the request, if it has not ended; tokens that are final can still be read."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._source.aclose()  # a task cancelled before it started has not done so

    async def _follow(self) -> None:
        async with aclosing(self._source):
            async for each in self._source:
                self._take(each)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._ended = time.monotonic()
        self._failure = None if task.cancelled() else task.exception()
        self._news.set()

    def _take(self, each: Followed) -> None:
        match each:
            case RequestOutput():
                self._output = each
            case Delta():
                self._first = self._first or time.monotonic()
                self._latest[each.index] = each
                self._tokens += len(each.token_ids)
                if each.token_ids or each.text or each.finish_reason:
                    self._unread.append(each)
                    self._news.set()
