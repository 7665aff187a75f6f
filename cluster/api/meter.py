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
        to.count("diffusion_num_denoising_steps", steps)
        params = self._request.params
        length = params.diffusion.block_length or self._block_length
        to.count("diffusion_num_canvas_positions", steps * min(length, params.max_tokens))
        new, self._tokens = len(output.token_ids) - self._tokens, len(output.token_ids)
        if not new:
            return
        to.count("generation_tokens", new)
        to.count("diffusion_num_committed_tokens", new)
        if self._first:
            to.observe("inter_token_latency_seconds", now - self._last)
        else:
            self._first, self._first_tokens = now, new
            to.observe("time_to_first_token_seconds", now - self._arrived)
        self._last = now

    def _begin(self, update: Update, now: float) -> None:
        to, request = self._to, self._request
        self._admitted = max(now - (update.ran or 0.0), self._arrived)
        to.observe("request_queue_time_seconds", self._admitted - self._arrived)
        if self._leads:
            to.count("prompt_tokens", len(request.prompt))
            to.observe("request_params_n", request.params.n)
        to.observe("request_prompt_tokens", len(request.prompt))
        to.observe("request_params_max_tokens", request.params.max_tokens)
        to.count("prefix_cache_queries", len(request.prompt))
        to.count("prefix_cache_hits", update.cached_tokens)

    def ended(self, output: CompletionOutput, error: BaseException | None) -> None:
        """Record how it ended, and its error, if any."""
        to = self._to
        if output.finish_reason is None:
            if self._admitted or not _is_refusal(error):
                to.count("request_aborted")
            return
        to.count("request_success", label=output.finish_reason)
        to.observe("e2e_request_latency_seconds", time.perf_counter() - self._arrived)
        to.observe("request_generation_tokens", self._tokens)
        if not self._first:
            return  # it ended without a token
        to.observe("request_prefill_time_seconds", self._first - self._admitted)
        to.observe("request_decode_time_seconds", self._last - self._first)
        to.observe("request_inference_time_seconds", self._last - self._admitted)
        if later := self._tokens - self._first_tokens:
            to.observe("request_time_per_output_token_seconds", (self._last - self._first) / later)


def _is_refusal(error: BaseException | None) -> bool:
    if isinstance(error, CancelledError):
        return error.args == (REFUSED,)
    return isinstance(error, Overloaded | EngineFailed | ValueError)
