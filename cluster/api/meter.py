"""Measures one choice, from its submission to its end."""

import time
from asyncio import CancelledError
from typing import Final, Self

from diffray.cluster.api.metrics import Metrics
from diffray.cluster.control.engine_client import EngineFailed, Overloaded
from diffray.workers.admission import CheckedRequest
from diffray.workers.messages import Update
from diffray.workers.output import CompletionOutput

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
