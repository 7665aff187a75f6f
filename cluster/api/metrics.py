"""What Prometheus reads: vLLM's names with our prefix, and what only diffusion has."""

import time
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from diffray.cluster.client import Load
from diffray.workers.admission import Limits
from diffray.workers.messages import Request, Update
from diffray.workers.output import CompletionOutput

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = "diffray:"
_SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_LONG_SECONDS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS: Final = tuple(float(2**power) for power in range(18))


class Metrics:
    """One model's counters and histograms; gauges are read from the engine at each scrape."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._gauges = _Gauges(model)
        self.registry.register(self._gauges)
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            names = ["model_name", *labels]
            return Counter(_PREFIX + name, text, names, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(
                _PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry
            )
            return made.labels(model)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.").labels(model)
        self.queries = counter("prefix_cache_queries", "Tokens of prompts, of each choice.").labels(
            model
        )
        self.hits = counter(
            "prefix_cache_hits", "Of them, those that the choice did not have to run."
        ).labels(model)
        self.generation_tokens = counter("generation_tokens", "Tokens written.").labels(model)
        self.success = counter("request_success", "Choices finished.", "finished_reason")
        self.aborted = counter("request_aborted", "Choices given up or failed.").labels(model)
        self.refused = counter("request_refused", "Requests refused or failed.", "status")
        self.steps = counter(
            "diffusion_num_denoising_steps", "Denoising steps of all choices."
        ).labels(model)
        self.positions = counter(
            "diffusion_num_canvas_positions", "Block positions evaluated in these steps."
        ).labels(model)
        self.committed = counter(
            "diffusion_num_committed_tokens", "Tokens that became final."
        ).labels(model)
        self.first = histogram("time_to_first_token_seconds", "Until the first token.", _SECONDS)
        self.between = histogram(
            "inter_token_latency_seconds", "Between reports of final tokens.", _SECONDS
        )
        self.each = histogram(
            "time_per_output_token_seconds", "After the first report, per token.", _SECONDS
        )
        self.whole = histogram("e2e_request_latency_seconds", "Of a choice.", _LONG_SECONDS)
        self.prompt_lengths = histogram("request_prompt_tokens", "Of a choice.", _TOKENS)
        self.lengths = histogram("request_generation_tokens", "Of a choice.", _TOKENS)
        self.wanted = histogram("request_params_max_tokens", "max_tokens asked for.", _TOKENS)
        self.choices = histogram("request_params_n", "n asked for.", _TOKENS[:8])

    def meter(self, request: Request) -> "Meter":
        return Meter(self, request)

    def asked(self, prompt_tokens: int, n: int) -> None:
        """Note one prompt."""
        self.prompt_tokens.inc(prompt_tokens)
        self.choices.observe(n)

    def note_refusal(self, status: int) -> None:
        self.refused.labels(self._model, str(status)).inc()

    def note_finish(self, reason: str) -> None:
        self.success.labels(self._model, reason).inc()

    def render(self, load: Load, limits: Limits, *, vllm_names: bool) -> bytes:
        """Return the text, with every family once more under vLLM's name if that is wanted."""
        self._gauges.load, self._gauges.limits = load, limits
        text = generate_latest(self.registry)
        return text + text.replace(_PREFIX.encode(), b"vllm:") if vllm_names else text


class Meter:
    """Measures one choice."""

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._to, self._request = metrics, request
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._first_tokens = self._tokens = self._forwards = 0
        metrics.prompt_lengths.observe(len(request.prompt))
        metrics.wanted.observe(request.params.max_tokens)

    def heard(self, update: Update, output: CompletionOutput) -> None:
        to, steps = self._to, update.forwards - self._forwards
        if not self._forwards:
            to.queries.inc(len(self._request.prompt))
            to.hits.inc(update.cached_tokens)
        self._forwards = update.forwards
        to.steps.inc(steps)
        params = self._request.params
        to.positions.inc(steps * min(params.diffusion.block_length, params.max_tokens))
        new, self._tokens = len(output.token_ids) - self._tokens, len(output.token_ids)
        if not new:
            return
        now = time.perf_counter()
        to.generation_tokens.inc(new)
        to.committed.inc(new)
        if self._first:
            to.between.observe(now - self._last)
        else:
            self._first, self._first_tokens = now, new
            to.first.observe(now - self._began)
        self._last = now

    def ended(self, output: CompletionOutput) -> None:
        to = self._to
        if output.finish_reason is None:
            to.aborted.inc()
            return
        to.note_finish(output.finish_reason)
        to.whole.observe(time.perf_counter() - self._began)
        to.lengths.observe(self._tokens)
        later = self._tokens - self._first_tokens
        if later:
            to.each.observe((self._last - self._first) / later)


class _Gauges:
    """The engine's own numbers, as of the last look."""

    def __init__(self, model: str) -> None:
        self.load = Load()
        self.limits: Limits | None = None
        self._model = model

    def collect(self) -> Iterator[Metric]:
        load = self.load
        used = 1 - load.free_pages / load.num_pages if load.num_pages else 0.0
        for name, text, value in (
            ("num_requests_running", "Choices in the engine.", load.running),
            ("num_requests_waiting", "Choices in the queue.", load.waiting),
            ("kv_cache_usage_perc", "Share of the K/V pages in use, 0 to 1.", used),
        ):
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in (
            ("num_preemptions", "Choices that gave way and went on later.", load.preemptions),
            ("num_rounds", "Rounds of denoising steps.", load.rounds),
            ("num_restarts", "Times the engine was started anew.", load.restarts),
            ("rank_work_seconds", "Of rank 0, in rounds.", load.worked),
            ("rank_wait_seconds", "Of rank 0, for the next round, with work there.", load.waited),
        ):
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        if self.limits is not None:
            labels = ["model_name", "block_size", "num_gpu_blocks"]
            info = GaugeMetricFamily(_PREFIX + "cache_config_info", "K/V pages.", labels=labels)
            sizes = self.limits.page_size, self.limits.num_pages
            info.add_metric([self._model, *(str(size) for size in sizes)], 1)
            yield info
