"""The choices of one HTTP request: one engine request each, with their deltas merged."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple

from diffray.cluster.api.errors import ApiError, as_api_error
from diffray.cluster.api.meter import REFUSED, Meter
from diffray.cluster.api.metrics import Metrics
from diffray.cluster.control.engine_client import (
    DeadlineExceeded,
    EngineClient,
    EngineFailed,
    Overloaded,
)
from diffray.components.image import Image
from diffray.workers.admission import CheckedRequest
from diffray.workers.job import Job
from diffray.workers.output import CompletionOutput, Delta

_WAITING: Final = 64  # deltas of several choices that may wait for a reader; later ones are merged


class Prompt(NamedTuple):
    """The given tokens, before and after those to generate."""

    ids: tuple[int, ...]
    suffix: tuple[int, ...] = ()
    before: str = ""  # texts to echo before and after the answer's own
    after: str = ""
    images: tuple[Image, ...] = ()


@dataclass(slots=True, eq=False)
class Choice:
    """One choice in progress; `index` counts over all prompts of its request."""

    index: int
    prompt: Prompt
    checked: CheckedRequest
    job: Job

    @property
    def output(self) -> CompletionOutput:
        return self.job.choice

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or id found; None for the model's own end token, as in vLLM."""
        found, params = self.output.stop_reason, self.checked.request.params
        is_own = found in self.checked.limits.eos_token_ids and found not in params.stop_token_ids
        return None if is_own else found


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs choices on an engine; closing the generator of deltas cancels those still running."""

    engine: EngineClient
    metrics: Metrics
    deadline: float | None = None  # seconds for each choice, from its submission

    async def deltas(
        self, choices: list[Choice], priority: int
    ) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """Yield the deltas of all choices until each has a finish reason.

        Raises ApiError if the engine refuses or fails.
        """
        if len(choices) == 1:
            async with aclosing(self._one(choices[0], priority)) as deltas:
                async for delta in deltas:
                    yield choices[0], delta
            return
        # A batch larger than the engine must not fill its queue: a choice starts when another ends.
        gate = asyncio.Semaphore(self.engine.limits.max_num_seqs)
        waiting: asyncio.Queue[tuple[Choice, Delta] | Exception] = asyncio.Queue(_WAITING)

        async def pump(choice: Choice) -> None:
            try:
                async with gate, aclosing(self._one(choice, priority)) as deltas:
                    async for delta in deltas:
                        await waiting.put((choice, delta))
            except Exception as error:
                await waiting.put(error)

        tasks = [asyncio.create_task(pump(choice)) for choice in choices]
        reason = None
        try:
            unfinished = len(choices)
            while unfinished:
                item = await waiting.get()
                if isinstance(item, Exception):
                    overloaded = isinstance(item, ApiError) and item.status == 429
                    reason = REFUSED if overloaded else None
                    raise item
                unfinished -= item[1].finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel(reason)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, choice: Choice, priority: int) -> AsyncGenerator[Delta, None]:
        try:
            with Meter(self.metrics, choice.checked, choice.output) as meter:
                updates = self.engine.submit(
                    choice.checked, priority=priority, deadline=self.deadline
                )
                async with aclosing(updates):
                    async for update in updates:
                        choice.job.apply(update)
                        meter.updated(update)
                        if (delta := choice.job.news()) is not None:
                            yield delta
                        if choice.job.finished:  # the engine would go on after a stop string
                            return
                raise EngineFailed("the engine ended a request before its answer was complete")
        except (Overloaded, EngineFailed, DeadlineExceeded) as error:
            raise as_api_error(error) from error
