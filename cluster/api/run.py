"""The choices of one HTTP request: an engine request each, their deltas in one stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from diffray.cluster.api.meter import REFUSED, Meter
from diffray.cluster.api.metrics import Metrics
from diffray.cluster.control.engine_client import EngineClient, EngineFailed, Overloaded
from diffray.workers.admission import CheckedRequest
from diffray.workers.job import Job
from diffray.workers.messages import Request, Update
from diffray.workers.output import CompletionOutput, Delta

_PIECES = 64  # events of several choices that wait for a reader; later ones are merged


@dataclass(slots=True, eq=False)
class Choice:
    """One choice in progress; `index` counts over all prompts of its HTTP request."""

    index: int
    prompt: int  # index of the prompt
    leads: bool  # it is the first choice of its prompt
    checked: CheckedRequest
    job: Job

    @property
    def request(self) -> Request:
        return self.checked.request

    @property
    def output(self) -> CompletionOutput:
        return self.job.choice

    def apply(self, update: Update) -> Delta | None:
        """Take over an update; return what became final."""
        self.job.apply(update)
        return self.job.news()


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs choices on an engine; closing a generator of its deltas cancels what still runs."""

    engine: EngineClient
    metrics: Metrics
    deadline: float | None = None  # seconds for each choice, from its submission

    async def deltas(
        self, choices: list[Choice], priority: int
    ) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """Yield the deltas of all choices until each has a finish reason."""
        if len(choices) == 1:
            async with aclosing(self._one(choices[0], priority)) as deltas:
                async for delta in deltas:
                    yield choices[0], delta
            return
        # A batch larger than the engine does not fill its queue: one starts when one ends.
        gate = asyncio.Semaphore(self.engine.limits.max_num_seqs)
        news: asyncio.Queue[tuple[Choice, Delta] | Exception] = asyncio.Queue(_PIECES)

        async def pump(choice: Choice) -> None:
            try:
                async with gate, aclosing(self._one(choice, priority)) as deltas:
                    async for delta in deltas:
                        await news.put((choice, delta))
            except Exception as error:
                await news.put(error)

        tasks = [asyncio.create_task(pump(choice)) for choice in choices]
        why = None
        try:
            unfinished = len(choices)
            while unfinished:
                heard = await news.get()
                if isinstance(heard, Exception):
                    why = REFUSED if isinstance(heard, Overloaded) else None
                    raise heard
                unfinished -= heard[1].finish_reason is not None
                yield heard
        finally:
            for task in tasks:
                task.cancel(why)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, choice: Choice, priority: int) -> AsyncGenerator[Delta, None]:
        own = self.engine.limits.spec.block_length
        meter = Meter(self.metrics, choice.request, leads=choice.leads, block_length=own)
        failure = None
        try:
            updates = self.engine.submit(choice.checked, priority=priority, deadline=self.deadline)
            async with aclosing(updates):
                async for update in updates:
                    delta = choice.apply(update)
                    meter.heard(update, choice.output)
                    if delta is not None:
                        yield delta
                    if choice.job.finished:  # at a stop string the engine would go on
                        return
            raise EngineFailed("the engine ended a request before its answer was complete")
        except BaseException as error:
            failure = error
            raise
        finally:
            meter.ended(choice.output, failure)
