"""Measures one choice, from its submission to its end."""

import time
from asyncio import CancelledError
from typing import Final

from diffray.cluster.api.metrics import Metrics
from diffray.cluster.control.engine_client import EngineFailed, Overloaded
from diffray.workers.messages import Request, Update
from diffray.workers.output import CompletionOutput

REFUSED: Final = "refused"  # a choice is cancelled because another of its request was refused


class Meter:
    """Counts a choice from its first update on; of a refused one only the refusal is counted.

    `leads`: it is the first choice of its prompt, which is counted once. `block_length` is the
    model's own.
    """

    def __init__(
        self, metrics: Metrics, request: Request, *, leads: bool, block_length: int
    ) -> None:
        self._to, self._request, self._leads = metrics, request, leads
        self._block_length = block_length
        self._arrived = time.perf_counter()
        self._admitted = self._first = self._last = 0.0
        self._first_tokens = self._tokens = self._forwards = 0

    def heard(self, update: Update, output: CompletionOutput) -> None:
        now, to = time.perf_counter(), self._to
        if not self._admitted:
            self._begin(update, now)
        steps, self._forwards = update.forwards - self._forwards, update.forwards
        to.steps.inc(steps)
        params = self._request.params
        length = params.diffusion.block_length or self._block_length
        to.positions.inc(steps * min(length, params.max_tokens))
        new, self._tokens = len(output.token_ids) - self._tokens, len(output.token_ids)
        if not new:
            return
        to.generation_tokens.inc(new)
        to.committed.inc(new)
        if self._first:
            to.between.observe(now - self._last)
        else:
            self._first, self._first_tokens = now, new
            to.first.observe(now - self._arrived)
        self._last = now

    def _begin(self, update: Update, now: float) -> None:
        to, request = self._to, self._request
        self._admitted = max(now - (update.ran or 0.0), self._arrived)
        to.queued.observe(self._admitted - self._arrived)
        if self._leads:
            to.prompt_tokens.inc(len(request.prompt))
            to.choices.observe(request.params.n)
        to.prompt_lengths.observe(len(request.prompt))
        to.wanted.observe(request.params.max_tokens)
        to.queries.inc(len(request.prompt))
        to.hits.inc(update.cached_tokens)

    def ended(self, output: CompletionOutput, error: BaseException | None) -> None:
        """Record how it ended, and its error, if any."""
        to = self._to
        if output.finish_reason is None:
            if self._admitted or not _is_refusal(error):
                to.aborted.inc()
            return
        to.success(output.finish_reason).inc()
        to.whole.observe(time.perf_counter() - self._arrived)
        to.lengths.observe(self._tokens)
        if not self._first:
            return  # it ended without a token
        to.prefill.observe(self._first - self._admitted)
        to.decode.observe(self._last - self._first)
        to.inference.observe(self._last - self._admitted)
        if later := self._tokens - self._first_tokens:
            to.each.observe((self._last - self._first) / later)


def _is_refusal(error: BaseException | None) -> bool:
    if isinstance(error, CancelledError):
        return error.args == (REFUSED,)
    return isinstance(error, Overloaded | EngineFailed | ValueError)
