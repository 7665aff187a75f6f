"""The choices of one HTTP request: one engine request each, measured, with their deltas merged."""

import asyncio
import time
from asyncio import CancelledError
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from diffray.cluster.api.errors import ApiError, as_api_error
from diffray.cluster.api.metrics import Metrics
from diffray.cluster.control.engine_client import (
    DeadlineExceeded,
    EngineClient,
    EngineFailed,
    Overloaded,
)
from diffray.cluster.frontend.output import CompletionOutput, Delta, Job
from diffray.components.image import Image
from diffray.workers.admission import CheckedRequest
from diffray.workers.messages import Update

REFUSED: Final = "refused"  # why a choice is cancelled: another one of its request was refused


class Meter:
    """Counts a choice from its first update on; a refused choice counts only as refused."""

    def __init__(self, metrics: Metrics, checked: CheckedRequest, output: CompletionOutput) -> None:
        self._metrics, self._request, self._output = metrics, checked.request, output
        self._block_positions = checked.block_positions
        self._arrived = time.perf_counter()
        self._admitted = self._first = self._last = 0.0
        self._first_tokens = self._tokens = self._forwards = 0

    def __enter__(self) -> Self:
        return self

    def updated(self, update: Update) -> None:
        """Count an update that the output already contains."""
        now, metrics = time.perf_counter(), self._metrics
        if not self._admitted:
            self._begin(update, now)
        steps, self._forwards = update.forwards - self._forwards, update.forwards
        metrics.count("diffusion_num_denoising_steps", steps)
        metrics.count("diffusion_num_canvas_positions", steps * self._block_positions)
        length = len(self._output.token_ids)
        new, self._tokens = length - self._tokens, length
        if not new:
            return
        metrics.count("generation_tokens", new)
        metrics.count("diffusion_num_committed_tokens", new)
        if self._first:
            metrics.observe("inter_token_latency_seconds", now - self._last)
        else:
            self._first, self._first_tokens = now, new
            metrics.observe("time_to_first_token_seconds", now - self._arrived)
        self._last = now

    def _begin(self, update: Update, now: float) -> None:
        metrics, params, length = self._metrics, self._request.params, len(self._request.prompt)
        self._admitted = max(now - (update.ran or 0.0), self._arrived)
        metrics.observe("request_queue_time_seconds", self._admitted - self._arrived)
        if self._output.index == 0:  # once for each prompt
            metrics.count("prompt_tokens", length)
            metrics.observe("request_params_n", params.n)
        metrics.observe("request_prompt_tokens", length)
        metrics.observe("request_params_max_tokens", params.max_tokens)
        metrics.count("prefix_cache_queries", length)
        metrics.count("prefix_cache_hits", update.cached_tokens)
        if update.approximate:
            metrics.count("prefix_cache_approximate_hits", update.cached_tokens)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        metrics, reason = self._metrics, self._output.finish_reason
        if reason is None:
            if self._admitted or not _is_refusal(error):
                metrics.count("request_aborted")
            return
        metrics.count("request_success", label=reason)
        metrics.observe("e2e_request_latency_seconds", time.perf_counter() - self._arrived)
        metrics.observe("request_generation_tokens", self._tokens)
        if not self._first:
            return  # it ended without a token
        metrics.observe("request_prefill_time_seconds", self._first - self._admitted)
        metrics.observe("request_decode_time_seconds", self._last - self._first)
        metrics.observe("request_inference_time_seconds", self._last - self._admitted)
        if later := self._tokens - self._first_tokens:
            metrics.observe(
                "request_time_per_output_token_seconds", (self._last - self._first) / later
            )


def _is_refusal(error: BaseException | None) -> bool:
    if isinstance(error, CancelledError):
        return error.args == (REFUSED,)
    return isinstance(error, Overloaded | EngineFailed | ValueError)


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
