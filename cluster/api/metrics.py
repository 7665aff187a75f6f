"""Prometheus metrics: vLLM's names with diffray's prefix, and those of diffusion."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from diffray.cluster.control.engine_client import Load
from diffray.workers.admission import Limits

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
_REFUSALS: Final = ("400", "404", "408", "413", "415", "422", "429", "503", "504")

Families = list[Metric]


class Metrics:
    """One replica's counters and histograms; gauges are read from the engine at each scrape.

    `replica` becomes a label, so that no other process writes the same series: a series never
    decreases, whichever replica shows it.
    """

    def __init__(self, model: str, replica: str = "") -> None:
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model} | ({"replica": replica} if replica else {})
        self._gauges = _Gauges(self.labels)
        self.registry.register(self._gauges)
        own = tuple(self.labels.values())

        def labelled(name: str, text: str, label: str, *values: str) -> Callable[[str], Counter]:
            made = Counter(_PREFIX + name, text, [*self.labels, label], registry=self.registry)
            for value in values:  # from 0, as a first value is not an increase
                made.labels(*own, value)
            return lambda value: made.labels(*own, value)

        def counter(name: str, text: str) -> Counter:
            return Counter(_PREFIX + name, text, self.labels, registry=self.registry).labels(*own)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(
                _PREFIX + name, text, self.labels, buckets=buckets, registry=self.registry
            )
            return made.labels(*own)

        self.prompt_tokens = counter(
            "prompt_tokens", "Tokens of prompts, counted when an answer to one begins."
        )
        self.queries = counter("prefix_cache_queries", "Tokens of prompts, of each choice.")
        self.hits = counter(
            "prefix_cache_hits", "Of them, those that the choice did not have to run."
        )
        self.generation_tokens = counter("generation_tokens", "Tokens written.")
        self.success = labelled(
            "request_success", "Choices finished.", "finished_reason", "stop", "length"
        )
        self.aborted = counter(
            "request_aborted", "Choices given up or failed; not those that were refused."
        )
        self.refused = labelled(
            "request_refused", "Requests refused or failed.", "status", *_REFUSALS
        )
        self.steps = counter("diffusion_num_denoising_steps", "Denoising steps of all choices.")
        self.positions = counter(
            "diffusion_num_canvas_positions", "Block positions evaluated in these steps."
        )
        self.committed = counter("diffusion_num_committed_tokens", "Tokens that became final.")
        self.queued = histogram(
            "request_queue_time_seconds", "Of a choice, until it was first admitted.", _LONG_SECONDS
        )
        self.prefill = histogram(
            "request_prefill_time_seconds",
            "Of a choice, from its admission to its first final tokens: the prompt's chunks, if it "
            "has any, and the first denoising steps, of which the very first runs the prompt.",
            _LONG_SECONDS,
        )
        self.decode = histogram(
            "request_decode_time_seconds",
            "Of a choice, from its first final tokens to its last.",
            _LONG_SECONDS,
        )
        self.inference = histogram(
            "request_inference_time_seconds",
            "Of a choice, from its admission to its last final tokens: prefill and decode.",
            _LONG_SECONDS,
        )
        self.first = histogram("time_to_first_token_seconds", "Until the first token.", _SECONDS)
        self.between = histogram(
            "inter_token_latency_seconds", "Between reports of final tokens.", _SECONDS
        )
        self.each = histogram(
            "request_time_per_output_token_seconds",
            "Of a choice, per token that came after the first report.",
            _SECONDS,
        )
        self.whole = histogram("e2e_request_latency_seconds", "Of a choice.", _LONG_SECONDS)
        self.prompt_lengths = histogram("request_prompt_tokens", "Of a choice.", _TOKENS)
        self.lengths = histogram("request_generation_tokens", "Of a choice.", _TOKENS)
        self.wanted = histogram("request_params_max_tokens", "max_tokens asked for.", _TOKENS)
        self.choices = histogram("request_params_n", "n asked for, of a prompt.", _TOKENS[:8])

    def families(self, load: Load, limits: Limits) -> Families:
        """Return all current values."""
        self._gauges.load, self._gauges.limits = load, limits
        return list(self.registry.collect())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One replica's metrics at one moment, sent to the replica that was scraped."""

    replica: str
    families: Families


def render(snapshots: Iterable[Snapshot], *, vllm_names: bool) -> bytes:
    """Return several replicas' metrics as one text, optionally also under vLLM's names."""
    merged: dict[str, Metric] = {}
    for snapshot in snapshots:
        for family in snapshot.families:
            if family.name not in merged:
                merged[family.name] = Metric(family.name, family.documentation, family.type)
            merged[family.name].samples += family.samples
    text = generate_latest(_Collected(merged.values()))
    return text + text.replace(_PREFIX.encode(), b"vllm:") if vllm_names else text


class _Collected(CollectorRegistry):
    """Families collected by another replica."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


class _Gauges:
    """The engine's numbers as of the last scrape."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.load = Load()
        self.limits: Limits | None = None
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        load, names, own = self.load, list(self._labels), list(self._labels.values())
        used = 1 - load.free_pages / load.num_pages if load.num_pages else 0.0
        for name, text, value in (
            ("num_requests_running", "Choices in the engine.", load.running),
            ("num_requests_waiting", "Choices in the queue.", load.waiting),
            ("kv_cache_usage_perc", "Share of the K/V pages in use, 0 to 1.", used),
        ):
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=names)
            gauge.add_metric(own, value)
            yield gauge
        for name, text, value in (
            ("num_preemptions", "Choices that gave way and went on later.", load.preemptions),
            ("num_rounds", "Rounds of denoising steps.", load.rounds),
            ("num_restarts", "Times the engine was started anew.", load.restarts),
            ("rank_work_seconds", "Of rank 0, in rounds.", load.worked),
            ("rank_wait_seconds", "Of rank 0, for the next round, with work there.", load.waited),
        ):
            counter = CounterMetricFamily(_PREFIX + name, text, labels=names)
            counter.add_metric(own, value)
            yield counter
        rounds = HistogramMetricFamily(
            _PREFIX + "iteration_tokens_total",
            "Tokens of all choices that became final in one round of denoising steps.",
            labels=names,
        )
        counts = list(accumulate(load.round_tokens))
        bounds = [*(str(float(2**power)) for power in range(len(counts) - 1)), "+Inf"]
        rounds.add_metric(own, list(zip(bounds, counts, strict=True)), load.tokens)
        yield rounds
        if self.limits is not None:
            labels = [*names, "block_size", "num_gpu_blocks"]
            info = GaugeMetricFamily(_PREFIX + "cache_config_info", "K/V pages.", labels=labels)
            sizes = self.limits.page_size, self.limits.num_pages
            info.add_metric([*own, *(str(size) for size in sizes)], 1)
            yield info
