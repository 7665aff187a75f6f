"""Loads several servers in turns with the same prompts, through one client."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import load, paired
from benchmarks.peers.checkpoint import ORDINARY, word
from benchmarks.peers.servers import Contender, Running

# Where a server counts sequences' steps, and the forwards that they shared.
COUNTERS = {"dlmserve": ("dlmserve_step_batch_size_sum", "dlmserve_step_batch_size_count")}


class Work(NamedTuple):
    """Sequences' steps, and the forwards that they shared."""

    rows: float
    forwards: float

    def rows_per_forward(self, before: "Work") -> float:
        return (self.rows - before.rows) / (self.forwards - before.forwards)


def prompts(count: int, shortest: int, longest: int, seed: int) -> list[str]:
    """Return ragged prompts of random words."""
    draws = random.Random(seed)
    lengths = [draws.randint(shortest, longest) for _ in range(count)]
    return [" ".join(word(draws.randrange(ORDINARY)) for _ in range(size)) for size in lengths]


def body(contender: Contender, model: str, prompt: str, gen_length: int) -> dict[str, Any]:
    """Return the request; dlmserve refuses every field that it does not know."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": gen_length,
        "temperature": 0.0,
        "stream": True,
    } | contender.body


@contextmanager
def awake(server: Running) -> Iterator[None]:
    server.resume()
    try:
        yield
    finally:
        server.pause()


def take_turn(
    contender: Contender,
    server: Running,
    asked: list[str],
    *,
    concurrency: int,
    gen_length: int,
) -> paired.Turn:
    """Send all prompts, so many at once; refuse answers of another length than was asked."""
    bodies = [body(contender, server.recipe.served, text, gen_length) for text in asked]

    async def send() -> list[load.Reply]:
        async with load.client(server.url) as http:
            return await load.all_of(bodies, concurrency, partial(load.streamed, http))

    with awake(server):
        begin = time.perf_counter()
        try:
            replies = asyncio.run(send())
        except (ValueError, httpx2.HTTPError) as error:
            raise ValueError(f"{contender.name} does not answer: {error}") from None
        seconds = time.perf_counter() - begin
    answers = [reply.text.split() for reply in replies]
    for words in answers:
        if len(words) != gen_length:
            raise ValueError(f"{contender.name} wrote {len(words)} tokens instead of {gen_length}")
    return paired.Turn(seconds, answers)


def work(servers: dict[str, Running]) -> dict[str, Work]:
    """Return what the servers that count it have done since they started."""
    found = {}
    for name, (rows, forwards) in COUNTERS.items():
        if name in servers:
            with awake(servers[name]):
                text = httpx2.get(servers[name].url + "/metrics", timeout=load.TIMEOUT_S).text
            found[name] = Work(counter(text, rows), counter(text, forwards))
    return found


def counter(metrics: str, name: str) -> float:
    """Return the sum of a counter's samples."""
    families = text_string_to_metric_families(metrics)
    return sum(each.value for family in families for each in family.samples if each.name == name)


def compare(
    found: list[Contender],
    servers: dict[str, Running],
    asked: list[str],
    *,
    concurrency: int,
    gen_length: int,
    turns: int,
) -> dict[str, list[paired.Turn]]:
    """Return each contender's turns."""

    def turn_of(contender: Contender) -> Callable[[int], paired.Turn]:
        server = servers[contender.server]
        return lambda _: take_turn(
            contender, server, asked, concurrency=concurrency, gen_length=gen_length
        )

    return paired.take_turns(
        {contender.name: turn_of(contender) for contender in found},
        turns,
        tell=lambda turn: f"{turn.rate:.2f} tokens/s at concurrency {concurrency}",
    )
