"""Prometheus metrics: vLLM's, with diffray's prefix, and those of diffusion."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from diffray.cluster.control.engine_client import Load
from diffray.workers.limits import Limits
from diffray.workers.stats import Shown

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
_COUNTERS: Final = {
    "prompt_tokens": "Tokens of prompts, counted when an answer to one starts.",
    "prefix_cache_queries": "Tokens of prompts, counted for each choice.",
    "prefix_cache_hits": "Of these, tokens that the choice did not have to compute.",
    "prefix_cache_approximate_hits": "Of the hits, tokens with K/V of another prompt's canvas.",
    "generation_tokens": "Tokens generated.",
    "request_success": "Choices finished.",
    "request_aborted": "Choices cancelled or failed, without the refused ones.",
    "request_refused": "Requests refused or failed.",
    "diffusion_num_denoising_steps": "Denoising steps of all choices.",
    "diffusion_num_canvas_positions": "Block positions evaluated in these steps.",
    "diffusion_num_committed_tokens": "Tokens that became final.",
}
# Counters with an additional label, and its values. Each series starts at 0, because to Prometheus
# the first value of a series does not count as an increase.
_LABELS: Final = {
    "request_success": ("finished_reason", ("stop", "length")),
    "request_refused": ("status", ("400", "404", "408", "413", "415", "422", "429", "503", "504")),
}
_HISTOGRAMS: Final = {
    _LONG_SECONDS: {
        "request_queue_time_seconds": "From a choice's arrival to its admission.",
        "request_prefill_time_seconds": "From a choice's admission to its first final tokens: the "
        "prompt's chunks, if it has any, and the first denoising steps, of which the very first "
        "runs the prompt.",
        "request_decode_time_seconds": "From a choice's first final tokens to its last.",
        "request_inference_time_seconds": "From a choice's admission to its last final tokens: "
        "prefill and decode.",
        "e2e_request_latency_seconds": "From a choice's arrival to its end.",
    },
    _SECONDS: {
        "time_to_first_token_seconds": "From a choice's arrival to its first token.",
        "inter_token_latency_seconds": "Between reports of final tokens.",
        "request_time_per_output_token_seconds": "Per token of a choice after its first report.",
    },
    _TOKENS: {
        "request_prompt_tokens": "Prompt tokens of a choice.",
        "request_generation_tokens": "Tokens generated for a choice.",
        "request_params_max_tokens": "max_tokens of a choice.",
    },
    _TOKENS[:8]: {"request_params_n": "n of a prompt."},
}

Families = list[Metric]


class Metrics:
    """One replica's counters and histograms; each scrape adds the engine's own numbers.

    `replica` becomes a label, so that one process alone writes a series, which never decreases,
    whichever replica reports it.
    """

    def __init__(self, model: str, replica: str = "") -> None:
        self._labels = {"model_name": model} | ({"replica": replica} if replica else {})
        self._own = tuple(self._labels.values())
        self._registry = CollectorRegistry()
        text = "The fewest replicas that the model should have."
        fewest = Gauge(_PREFIX + "min_replicas", text, self._labels, registry=self._registry)
        self._fewest = fewest.labels(*self._own)
        self.expect_replicas(1)
        self._counters: dict[str, Counter] = {}
        for name, text in _COUNTERS.items():
            label, values = _LABELS.get(name, (None, ()))
            labels = [*self._labels, label] if label else self._labels
            counter = Counter(_PREFIX + name, text, labels, registry=self._registry)
            for value in values:
                counter.labels(*self._own, value)
            self._counters[name] = counter if label else counter.labels(*self._own)
        self._histograms = {
            name: Histogram(
                _PREFIX + name, text, self._labels, buckets=buckets, registry=self._registry
            ).labels(*self._own)
            for buckets, histograms in _HISTOGRAMS.items()
            for name, text in histograms.items()
        }

    def expect_replicas(self, fewest: int) -> None:
        """Say how many replicas the model should have at least."""
        self._fewest.set(fewest)

    def count(self, name: str, amount: float = 1, label: str | None = None) -> None:
        """Add to a counter; `label` is the value of the counter's own label, if it has one."""
        counter = self._counters[name]
        (counter if label is None else counter.labels(*self._own, label)).inc(amount)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def families(self, load: Load, limits: Limits) -> Families:
        """Return all current values, with the engine's."""
        return [*_engine_families(self._labels, load, limits), *self._registry.collect()]


class Refusals:
    """Counts what an ingress itself refuses, under the name of models' refusals."""

    def __init__(self, replica: str) -> None:
        self._registry, self._replica = CollectorRegistry(), replica
        name, (label, values) = "request_refused", _LABELS["request_refused"]
        labels = ["replica", label]
        self._counter = Counter(_PREFIX + name, _COUNTERS[name], labels, registry=self._registry)
        for value in values:
            self._counter.labels(replica, value)

    def count(self, status: int) -> None:
        self._counter.labels(self._replica, str(status)).inc()

    def snapshot(self) -> "Snapshot":
        return Snapshot(self._replica, [*self._registry.collect()])


def _engine_families(own: Mapping[str, str], load: Load, limits: Limits) -> Iterator[Metric]:
    labels, values = list(own), list(own.values())
    used = 1 - load.free_pages / load.num_pages if load.num_pages else 0.0
    kept = load.engine.prefixes
    held = kept.host_bytes / kept.host_capacity if kept.host_capacity else 0.0
    host = "Share of the host's memory for prefixes in use, 0 to 1."
    for (name, text, grows), value in (
        *_declared(load),
        (Shown("kv_cache_usage_perc", "Share of the K/V pages in use, 0 to 1.", False), used),
        (Shown("kv_offload_cpu_cache_usage_perc", host, False), held),
    ):
        family = CounterMetricFamily if grows else GaugeMetricFamily
        made = family(_PREFIX + name, text, labels=labels)
        made.add_metric(values, value)
        yield made
    sizes = GaugeMetricFamily(
        _PREFIX + "prefix_cache_bytes",
        "Bytes of the prefixes that each rank keeps.",
        labels=[*labels, "tier"],
    )
    sizes.add_metric([*values, "device"], kept.device_bytes)
    sizes.add_metric([*values, "host"], kept.host_bytes)
    yield sizes
    rounds = HistogramMetricFamily(
        _PREFIX + "iteration_tokens_total",
        "Tokens of all choices that became final in one round of denoising steps.",
        labels=labels,
    )
    counts = list(accumulate(load.round_tokens))
    bounds = [*(str(float(2**power)) for power in range(len(counts) - 1)), "+Inf"]
    rounds.add_metric(values, list(zip(bounds, counts, strict=True)), load.tokens)
    yield rounds
    size = {"block_size": str(limits.page_size), "num_gpu_blocks": str(limits.num_pages)}
    for name, text, facts in (
        ("cache_config_info", "K/V pages.", size),
        ("weights_info", "The weights' version.", {"version": load.weights_version}),
    ):
        info = GaugeMetricFamily(_PREFIX + name, text, labels=[*labels, *facts])
        info.add_metric([*values, *facts.values()], 1)
        yield info


def _declared(record: Any) -> Iterator[tuple[Shown, float]]:
    """Yield what the fields of a record, and of records in it, are shown as, and their values."""
    for each in fields(record):
        value = getattr(record, each.name)
        if is_dataclass(value):
            yield from _declared(value)
        elif shown := each.metadata.get("shown"):
            yield shown, value


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
    text = generate_latest(_Merged(merged.values()))
    return text + text.replace(_PREFIX.encode(), b"vllm:") if vllm_names else text


@dataclass(frozen=True, slots=True)
class _Merged:
    """The families of several replicas, as a Collector of prometheus_client."""

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families
