"""Puts load on one server, as the arrivals say, and collects the replies."""

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import httpx2

from diffray.cluster.cli.bench.counters import Diffusion, RankSeconds, between, rank_seconds, scrape
from diffray.cluster.cli.bench.streamed import Reply, ask

RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what is told with each."""

    client: httpx2.AsyncClient
    path: str
    headers: dict[str, str]
    id_prefix: str

    async def send(self, body: dict[str, Any], number: int, arrival: float) -> Reply:
        headers = self.headers | {"x-request-id": f"{self.id_prefix}{number}"}
        return await ask(self.client, self.path, body, arrival=arrival, headers=headers)


@dataclass(frozen=True, slots=True)
class Load:
    """One run: all replies, how long it took, and what the server's counters say of it.

    `numbers` are the places of the replies' bodies: one that was interrupted lacks some.
    """

    rate: float
    concurrency: int | None
    seconds: float
    replies: list[Reply]
    diffusion: Diffusion | None
    rank: RankSeconds | None = None
    numbers: tuple[int, ...] = ()
    interrupted: bool = False


async def wait_until_ready(target: Target, body: dict[str, Any], timeout: float) -> None:
    """Send a request until it is answered; after `timeout` seconds, say why it is not."""
    begin = time.perf_counter()
    while True:
        reply = await target.send(body, 0, time.perf_counter())
        if reply.success:
            return
        if time.perf_counter() - begin + RETRY_SECONDS > timeout:
            raise ValueError(f"the server was not ready in {timeout:g} s: {reply.error}")
        await asyncio.sleep(RETRY_SECONDS)


async def run_load(
    target: Target,
    bodies: list[dict[str, Any]],
    offsets: list[float],
    *,
    rate: float,
    concurrency: int | None,
    tick: Callable[[], object],
) -> Load:
    """Send each body at its offset, however many are unanswered.

    With a concurrency, that many are under way and the others wait here, which their replies tell.
    Cancelled, it gives up what is under way and returns what there is.
    """
    gate = asyncio.Semaphore(concurrency) if concurrency else nullcontext()

    async def one(number: int, body: dict[str, Any], arrival: float) -> Reply:
        async with gate:
            reply = await target.send(body, number, arrival)
        tick()
        return reply

    before = await scrape(target.client)
    begin = time.perf_counter()
    tasks: list[asyncio.Task[Reply]] = []
    interrupted = False
    try:
        for number, (body, offset) in enumerate(zip(bodies, offsets, strict=True)):
            # Even at once, each turn lets those on their way get on.
            await asyncio.sleep(max(0.0, begin + offset - time.perf_counter()))
            tasks.append(asyncio.create_task(one(number, body, begin + offset)))
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        interrupted = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.perf_counter() - begin
    after = await scrape(target.client)
    done = {number: task.result() for number, task in enumerate(tasks) if not task.cancelled()}
    return Load(
        rate,
        concurrency,
        seconds,
        list(done.values()),
        between(before, after, seconds),
        rank_seconds(before, after),
        tuple(done),
        interrupted,
    )
