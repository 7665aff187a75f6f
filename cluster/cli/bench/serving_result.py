"""What a run against a server amounts to, with the keys of `vllm bench serve` and its formulas."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any, Final

from diffray.cluster.cli.bench.load import Load
from diffray.cluster.cli.bench.percentiles import Spread, as_word, percentile
from diffray.cluster.cli.bench.streamed import Reply

METRICS: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}
GOODPUT: Final = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which numbers to report."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percents: tuple[float, ...] = (99.0,)
    goodput: dict[str, float] = field(default_factory=dict)  # milliseconds

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ValueError(
                    f"--percentile-metrics: no {name!r}; allowed: {', '.join(METRICS)}"
                )


def read_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Return the milliseconds of each NAME:MILLISECONDS."""
    found = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in GOODPUT or found[name] < 0:
            raise ValueError(
                f"--goodput {pair!r} is no NAME:MILLISECONDS with a name of {', '.join(GOODPUT)}"
            )
    return found


@dataclass(frozen=True, slots=True)
class Served:
    """A run and its numbers."""

    load: Load
    wanted: Wanted
    result: dict[str, Any]
    spreads: dict[str, Spread]

    @staticmethod
    def of(load: Load, wanted: Wanted) -> "Served":
        spreads = {
            name: Spread.of([1e3 * v for v in _values(load, name)], wanted.percents)
            for name in METRICS
        }
        return Served(load, wanted, _result(load, wanted, spreads), spreads)

    @property
    def p99_latency(self) -> float:
        """Milliseconds, whatever percentiles were asked for."""
        return percentile([1e3 * value for value in _values(self.load, "e2el")], 99)

    @property
    def time_per_block(self) -> float | None:
        """Milliseconds that a request spends on one of its blocks, on average."""
        if self.load.diffusion is None or not self.result["completed"]:
            return None
        canvas = self.load.diffusion.canvas
        blocks = sum(ceil((r.output_tokens or 0) / canvas) for r in self.load.replies if r.success)
        spent = sum(r.latency for r in self.load.replies if r.success)
        return 1e3 * spent / blocks if blocks else None


def _values(load: Load, name: str) -> list[float]:
    good = [reply for reply in load.replies if reply.success]
    match name:
        case "ttft":
            return [reply.ttft for reply in good]
        case "tpot":
            return [reply.tpot for reply in good if (reply.output_tokens or 0) > 1]
        case "itl":
            return [gap for reply in good for gap in reply.itl]
        case "client_queue_time":
            return [reply.queued for reply in good]
        case "e2el_including_client_queue":
            return [reply.latency + reply.queued for reply in good]
        case _:
            return [reply.latency for reply in good]


def _result(load: Load, wanted: Wanted, spreads: dict[str, Spread]) -> dict[str, Any]:
    replies, seconds = load.replies, load.seconds
    good = [reply for reply in replies if reply.success]
    read = sum(reply.prompt_tokens or 0 for reply in good)
    written = sum(reply.output_tokens or 0 for reply in good)
    met = sum(_meets(reply, wanted.goodput) for reply in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(replies) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(good) / seconds,
        "request_goodput": met / seconds if wanted.goodput else None,
        "output_throughput": written / seconds,
        "total_token_throughput": (read + written) / seconds,
        "input_lens": [reply.prompt_tokens or 0 for reply in replies],
        "output_lens": [(reply.output_tokens or 0) if reply.success else 0 for reply in replies],
        "ttfts": [reply.ttft for reply in replies],
        "itls": [reply.itl for reply in replies],
        "latencies": [reply.latency for reply in replies],
        "start_times": [reply.start for reply in replies],
        "queue_times": [reply.queued for reply in replies],
        "generated_texts": [reply.text for reply in replies],
        "errors": [reply.error for reply in replies],
        "max_output_tokens_per_s": peak_tokens(good),
        "max_concurrent_requests": peak_concurrency(good),
    }
    if load.diffusion is not None:
        for name in load.diffusion.__dataclass_fields__:
            result[f"diffusion_{name}"] = getattr(load.diffusion, name)
    if load.rank is not None:
        result |= {"rank_work_seconds": load.rank.work, "rank_wait_seconds": load.rank.wait}
    for name in wanted.metrics:
        spread = spreads[name]
        result[f"mean_{name}_ms"] = spread.mean
        result[f"median_{name}_ms"] = spread.median
        result[f"std_{name}_ms"] = spread.std
        for percent, value in spread.percentiles:
            result[f"p{as_word(percent)}_{name}_ms"] = value
    return result


def _meets(reply: Reply, goodput: dict[str, float]) -> bool:
    took = {"ttft": reply.ttft, "tpot": reply.tpot, "e2el": reply.latency}
    return all(1e3 * took[name] <= limit for name, limit in goodput.items())


def peak_tokens(replies: Sequence[Reply]) -> float:
    """Return the most tokens of any one second of the run.

    A chunk carries many tokens, and its text does not say how many: a reply's tokens are dealt out
    over its chunks by their characters.
    """
    if not replies:
        return 0.0
    begin = min(reply.start for reply in replies)
    seconds: dict[int, float] = {}
    for reply in replies:
        whole = sum(size for _, size in reply.pieces)
        for moment, size in reply.pieces:
            place = int(moment - begin)
            tokens = (reply.output_tokens or 0) * size / whole
            seconds[place] = seconds.get(place, 0.0) + tokens
    return max(seconds.values(), default=0.0)


def peak_concurrency(replies: Sequence[Reply]) -> int:
    """Return how many requests were under way together at the most; ends come before starts."""
    events = [(reply.start, 1) for reply in replies]
    events += [(reply.start + reply.latency, -1) for reply in replies]
    now = most = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


def printed(served: Served) -> list[str]:
    """Return the block that `vllm bench serve` prints, and below it what only diffusion has."""
    load, result = served.load, served.result
    lines = [_title(" Serving Benchmark Result ", "=")]
    lines.append(_line("Successful requests:", result["completed"]))
    lines.append(_line("Failed requests:", result["failed"]))
    if load.concurrency is not None:
        lines.append(_line("Maximum request concurrency:", load.concurrency))
    if load.rate != inf:
        lines.append(_line("Request rate configured (RPS):", load.rate))
    lines.append(_line("Benchmark duration (s):", load.seconds))
    lines.append(_line("Total input tokens:", result["total_input_tokens"]))
    lines.append(_line("Total generated tokens:", result["total_output_tokens"]))
    lines.append(_line("Request throughput (req/s):", result["request_throughput"]))
    if served.wanted.goodput:
        lines.append(_line("Request goodput (req/s):", result["request_goodput"]))
    lines.append(_line("Output token throughput (tok/s):", result["output_throughput"]))
    lines.append(_line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]))
    lines.append(_line("Peak concurrent requests:", float(result["max_concurrent_requests"])))
    lines.append(_line("Total token throughput (tok/s):", result["total_token_throughput"]))
    for name in served.wanted.metrics:
        short, title = METRICS[name]
        spread = served.spreads[name]
        lines.append(_title(title, "-"))
        lines.append(_line(f"Mean {short} (ms):", spread.mean))
        lines.append(_line(f"Median {short} (ms):", spread.median))
        for percent, value in spread.percentiles:
            lines.append(_line(f"P{as_word(percent)} {short} (ms):", value))
    if load.diffusion is not None:
        found = load.diffusion
        lines.append(_title("Diffusion Decoding", "-"))
        lines.append(_line("Committed throughput (tok/s):", found.committed_throughput))
        lines.append(_line("Denoising steps per canvas:", found.steps_per_canvas))
        lines.append(_line("Committed per denoising step:", found.committed_per_step))
        lines.append(_line("Committed tokens:", found.committed_tokens))
        lines.append(_line("Denoising steps:", found.denoising_steps))
        lines.append(_line("Canvas positions evaluated:", found.canvas_positions))
    lines.append("=" * 50)
    if load.interrupted:
        lines.append("Interrupted: only requests that had been answered by then are counted.")
    if not result["completed"]:
        lines.append("No request succeeded: there is nothing to tell of times and of decoding.")
    elif load.diffusion is None:
        lines.append("The server's /metrics tell nothing of diffusion: no Diffusion Decoding.")
    if (per_block := served.time_per_block) is not None:
        lines.append(_line("Mean time per block (ms):", per_block))
    if load.rank is not None:
        lines.append(_line("Rank 0 in rounds (s):", load.rank.work))
        lines.append(_line("Rank 0 waiting for rounds (s):", load.rank.wait))
    return lines


def _title(text: str, rule: str) -> str:
    return f"{text:{rule}^50}"


def _line(label: str, value: int | float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"
