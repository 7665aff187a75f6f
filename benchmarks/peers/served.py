"""Loads several servers in turns with the same prompts, through one client."""

import asyncio
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.peers.checkpoint import ORDINARY, word
from benchmarks.peers.servers import Contender, Running
from diffray.cluster.cli.bench.load import Load, Target, run_load
from diffray.cluster.cli.endpoint import Endpoint

TIMEOUT_S = 600.0
# Where a server counts sequences' steps, and the forwards that they shared.
COUNTERS = {"dlmserve": ("dlmserve_step_batch_size_sum", "dlmserve_step_batch_size_count")}


class Work(NamedTuple):
    """Sequences' steps, and the forwards that they shared."""

    rows: float
    forwards: float

    def rows_per_forward(self, before: "Work") -> float:
        return (self.rows - before.rows) / (self.forwards - before.forwards)


@dataclass(frozen=True, slots=True)
class Turn:
    """One contender's answers to all prompts, as words, and how long they took together."""

    seconds: float
    answers: list[list[str]]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.answers)) / self.seconds


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
) -> Turn:
    """Send all prompts, so many at once; refuse answers of another length than was asked."""
    bodies = [body(contender, server.recipe.served, text, gen_length) for text in asked]
    with awake(server):
        load = asyncio.run(_load(server, bodies, concurrency))
    answers = []
    for reply in load.replies:
        if not reply.success:
            raise ValueError(f"{contender.name} does not answer: {reply.error}")
        words = reply.text.split()
        if len(words) != gen_length:
            raise ValueError(f"{contender.name} wrote {len(words)} tokens instead of {gen_length}")
        answers.append(words)
    return Turn(load.seconds, answers)


async def _load(server: Running, bodies: list[dict[str, Any]], concurrency: int) -> Load:
    endpoint = Endpoint.at(server.url)
    async with httpx2.AsyncClient(**endpoint.options(TIMEOUT_S)) as client:
        target = Target(client, "/v1/chat/completions", {}, "peers-")
        at_once = [0.0] * len(bodies)
        return await run_load(
            target,
            bodies,
            at_once,
            rate=float("inf"),
            concurrency=concurrency,
            tick=lambda: None,
        )


def work(servers: dict[str, Running]) -> dict[str, Work]:
    """Return what the servers that count it have done since they started."""
    found = {}
    for name, (rows, forwards) in COUNTERS.items():
        if name in servers:
            with awake(servers[name]):
                text = httpx2.get(servers[name].url + "/metrics", timeout=TIMEOUT_S).text
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
) -> dict[str, list[Turn]]:
    """Return each contender's turns; the first, in which everything is warmed, does not count."""
    results: dict[str, list[Turn]] = {contender.name: [] for contender in found}
    for number in range(turns + 1):
        for contender in found if number % 2 else reversed(found):
            turn = take_turn(
                contender,
                servers[contender.server],
                asked,
                concurrency=concurrency,
                gen_length=gen_length,
            )
            told = f"{turn.rate:.2f} tokens/s" + ("" if number else ", warming")
            print(f"concurrency {concurrency}, {contender.name}: {told}", file=sys.stderr)
            if number:
                results[contender.name].append(turn)
    return results
