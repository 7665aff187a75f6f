"""The choices of one HTTP request: each an engine request of its own, their news in one stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from diffray.cluster.api.meter import REFUSED, Meter
from diffray.cluster.api.metrics import Metrics
from diffray.cluster.control.engine_client import EngineClient, EngineFailed, Overloaded
from diffray.workers.job import Job
from diffray.workers.messages import Request, Update
from diffray.workers.output import CompletionOutput, Delta

_PIECES = 64  # news of several choices that wait for a reader; more wait where they are joined


@dataclass(slots=True, eq=False)
class Choice:
    """One choice in progress; `index` counts over all prompts of its HTTP request."""

    index: int
    prompt: int  # which of the prompts
    leads: bool  # it is the first choice of its prompt
    request: Request
    job: Job

    @property
    def output(self) -> CompletionOutput:
        return self.job.choice

    def apply(self, update: Update) -> Delta | None:
        """Take over an update; return what became certain."""
        self.job.apply(update)
        return self.job.news()


class Event(NamedTuple):
    """News of one choice."""

    choice: Choice
    delta: Delta | None
    canvas: list[int | None] | None


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs choices on an engine; closing a generator of its events cancels what still runs."""

    engine: EngineClient
    metrics: Metrics
    deadline: float | None = None  # seconds for each choice, from its submission

    async def events(self, choices: list[Choice], priority: int) -> AsyncGenerator[Event, None]:
        """Yield news of all choices until each has a finish reason."""
        if len(choices) == 1:
            async with aclosing(self._one(choices[0], priority)) as events:
                async for event in events:
                    yield event
            return
        # A batch larger than the engine does not crowd its queue; each that ends lets one in.
        gate = asyncio.Semaphore(self.engine.limits.max_num_seqs)
        news: asyncio.Queue[Event | Exception] = asyncio.Queue(_PIECES)

        async def pump(choice: Choice) -> None:
            try:
                async with gate, aclosing(self._one(choice, priority)) as events:
                    async for event in events:
                        await news.put(event)
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
                unfinished -= heard.delta is not None and heard.delta.finish_reason is not None
                yield heard
        finally:
            for task in tasks:
                task.cancel(why)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, choice: Choice, priority: int) -> AsyncGenerator[Event, None]:
        own = self.engine.limits.spec.block_length
        meter = Meter(self.metrics, choice.request, leads=choice.leads, block_length=own)
        failure = None
        try:
            updates = self.engine.submit(choice.request, priority=priority, deadline=self.deadline)
            async with aclosing(updates):
                async for update in updates:
                    delta = choice.apply(update)
                    meter.heard(update, choice.output)
                    if delta is not None or update.canvas is not None:
                        yield Event(choice, delta, update.canvas)
                    if choice.job.finished:  # at a stop string the engine would go on
                        return
            raise EngineFailed("the engine ended a request before its answer was complete")
        except BaseException as error:
            failure = error
            raise
        finally:
            meter.ended(choice.output, failure)
