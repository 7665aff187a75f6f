"""Compares servers under the same load: flags of `diffray serve`, or this checkout and another.

    python -m benchmarks.serving "" RAY_SERVE_ENABLE_HA_PROXY=1
    python -m benchmarks.serving "" PYTHONPATH=/path/to/another/checkout

A server is a quoted list of flags; NAME=VALUE is a variable of its environment. Servers start one
after the other and are idle but for their turn: held-out questions of the demo models, streamed,
with all answers of one length. Processor seconds are those of all of a server's processes. The
last table has the seconds until a server is ready, its processes, and their share of memory.
"""

import argparse
import asyncio
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import load, paired
from benchmarks.serve_process import ServeProcess, serve_process

VARIABLE = re.compile(r"\w+=")


class Turn(NamedTuple):
    """What one turn at one load took."""

    rate: float  # tokens per second
    thrift: float  # tokens per processor second
    first_s: float  # median seconds to the first text


def memory_mb(server: ServeProcess) -> float:
    """Return the proportional share of memory of all processes."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in server.processes()]
    shares = [re.search(r"Pss:\s+(\d+)", rollup) for rollup in rollups]
    return sum(int(share[1]) for share in shares if share) / 1024


def take(server: ServeProcess, args: argparse.Namespace, at_once: int) -> Turn:
    """Stream answers to all questions, so many at once."""

    async def work() -> list[load.Reply]:
        async with load.client(server.url) as http:
            bodies = load.chats(max(args.requests, at_once), args.max_tokens)
            return await load.all_of(bodies, at_once, partial(load.streamed, http))

    worked, begin = server.processor_seconds(), time.perf_counter()
    replies = asyncio.run(work())
    seconds, worked = time.perf_counter() - begin, server.processor_seconds() - worked
    tokens = len(replies) * args.max_tokens
    return Turn(tokens / seconds, tokens / worked, median(each.chunks_s[0] for each in replies))


def started(stack: ExitStack, text: str, args: argparse.Namespace) -> tuple[ServeProcess, float]:
    """Start a server; return it with the seconds until it was ready."""
    words = [args.model, *text.split()]
    settings = dict(word.split("=", 1) for word in words if VARIABLE.match(word))
    flags = [word for word in words if not VARIABLE.match(word)]
    begin = time.perf_counter()
    server = stack.enter_context(serve_process(*flags, settings=settings))
    server.wait_for("/v1", 1)
    return server, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--requests", type=int, default=64, help="of a turn, at least")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    args, servers = parser.parse_known_args()
    with ExitStack() as stack:
        running = {text: started(stack, text, args) for text in servers or [""]}

        def contender(server: ServeProcess) -> Callable[[int], dict[int, Turn]]:
            return lambda _: {at_once: take(server, args, at_once) for at_once in args.at_once}

        found = paired.take_turns(
            {text: contender(server) for text, (server, _) in running.items()}, args.turns
        )
        held = {
            text: (memory_mb(server), len(server.processes()))
            for text, (server, _) in running.items()
        }
    columns = "server", "at once", "tokens/s", "ratio", "tokens per processor s", "ratio"
    print(paired.head(*columns, "first text, ms"))
    first = next(iter(found.values()))
    for at_once in args.at_once:
        base = [turn[at_once] for turn in first]
        for text, turns in found.items():
            own = [turn[at_once] for turn in turns]
            cells: list[object] = [text or "defaults", at_once]
            for ours, theirs in (
                ([t.rate for t in own], [t.rate for t in base]),
                ([t.thrift for t in own], [t.thrift for t in base]),
            ):
                cells += [f"{median(ours):.0f}", paired.ratio(ours, theirs)]
            print(paired.row(*cells, f"{1e3 * median(t.first_s for t in own):.0f}"))
    print()
    print(paired.head("server", "ready, s", "processes", "memory, MB"))
    for text, (_, seconds) in running.items():
        megabytes, processes = held[text]
        print(paired.row(text or "defaults", f"{seconds:.1f}", processes, f"{megabytes:.0f}"))


if __name__ == "__main__":
    main()
