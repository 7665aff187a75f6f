"""How the offline benchmarks print what they found."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from diffray.cluster.cli.bench.offline import Looked
from diffray.cluster.cli.bench.percentiles import Spread, as_word

PERCENTS = (10, 25, 50, 75, 90, 99)

COLUMNS = (
    "requests",
    "tokens/s",
    "tokens per forward",
    "forwards/s",
    "step ms",
    "share of roofline",
)


def console() -> Console:
    """Return where tables go; into a file or a pipe they go in full width."""
    found = Console()
    return found if found.is_terminal else Console(width=140)


def cells(looked: Looked) -> list[str]:
    """Return a row below `COLUMNS`."""
    run = looked.run
    return [
        str(run.requests),
        f"{run.tokens_per_second:.1f}",
        f"{run.tokens_per_forward:.2f}",
        f"{run.forwards_per_second:.1f}",
        f"{1e3 * run.step_seconds:.2f}",
        f"{100 * looked.roofline_share:.1f} %",
    ]


def print_found(found: Sequence[Looked], what: str) -> None:
    """Print the numbers, then where the time went."""
    screen = console()
    table = Table(what, *COLUMNS)
    for looked in found:
        table.add_row(looked.run.name, *cells(looked))
    screen.print(table)
    phases = list(found[0].split)
    split = Table(what, *(f"{phase} ms" for phase in phases), "watched step ms", "MB read a step")
    for looked in found:
        each = [
            f"{1e3 * seconds / max(looked.split_forwards, 1):.2f} ({100 * share:.0f} %)"
            for seconds, share in zip(looked.split.values(), looked.shares.values(), strict=True)
        ]
        watched, read = 1e3 * looked.watched_step_seconds, looked.bytes_per_step / 1e6
        split.add_row(looked.run.name, *each, f"{watched:.2f}", f"{read:.1f}")
    screen.print(split)
    screen.print(f"memory bandwidth: {found[0].bandwidth / 1e9:.1f} GB/s, measured at the start")


def latency_lines(latencies: Sequence[float]) -> list[str]:
    """Return the lines of `vllm bench latency`."""
    spread = Spread.of(latencies, PERCENTS)
    return [
        f"Avg latency: {spread.mean} seconds",
        *(f"{as_word(p)}% percentile latency: {value} seconds" for p, value in spread.percentiles),
    ]


def throughput_line(looked: Looked) -> str:
    """Return the line of `vllm bench throughput`."""
    run = looked.run
    whole = (run.prompt_tokens + run.tokens) / run.seconds
    return (
        f"Throughput: {run.requests / run.seconds:.2f} requests/s, "
        f"{whole:.2f} total tokens/s, {run.tokens_per_second:.2f} output tokens/s"
    )
