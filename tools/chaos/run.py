"""One run: clients under a schedule of faults, and what became of both."""

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx2

from tools.chaos.batch import answered
from tools.chaos.faults import CUTS, Fault
from tools.chaos.neighbour import Neighbour
from tools.chaos.system import System
from tools.chaos.workload import SILENCE_S, Client, Question, Tally

RECOVERED_S = 120.0  # a fault from which nothing recovers in so long ends the run
_ON_ITS_WAY_S = 0.3  # tokens that were written before a fault still arrive for so long
_BURST = 150  # requests at once
_REPLACED_S = 30.0
BATCH = 120  # requests that are answered meanwhile
CALM = 5  # waits that are measured before the first fault


class Heard(Protocol):
    """A client, as far as its silence is measured."""

    heard: float  # when it was last sent tokens


@dataclass(slots=True)
class Hit:
    """A fault as it happened."""

    fault: Fault
    at: float
    pid: int | None
    well: float  # when it is over; what is killed or hangs begins to heal at once
    recovered: float | None = None  # seconds from then until every client was sent tokens again
    told: str = ""

    def breaks_until(self) -> float:
        """Return until when a new connection may be given to what is lost."""
        if (seconds := CUTS.get(self.fault.kind)) is None:
            return 0.0
        return math.inf if self.recovered is None else self.well + max(self.recovered, seconds)


@dataclass(slots=True)
class Outcome:
    """What a run has found."""

    tally: Tally = field(default_factory=Tally)
    hits: list[Hit] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)  # the same wait before any fault
    busy: int = 0  # processes beside it that want a core each
    seconds: float = 0.0

    def may_break(self, since: float) -> bool:
        """Whether a fault may have cut connections that were open since then."""
        return any(hit.breaks_until() > since for hit in self.hits)


@asynccontextmanager
async def clients(
    system: System, asked: list[Question], streams: int, outcome: Outcome
) -> AsyncIterator[list[Client]]:
    """Run so many clients; at the end each finishes what it has begun."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx2.Timeout(SILENCE_S, connect=30)
    stop = asyncio.Event()
    async with httpx2.AsyncClient(
        base_url=system.served.url, limits=limits, timeout=timeout
    ) as http:
        found = [
            Client(number, http, system.model, asked, outcome.tally, outcome.may_break)
            for number in range(streams)
        ]
        tasks = [asyncio.create_task(client.run(stop)) for client in found]
        try:
            yield found
            stop.set()
            async with asyncio.timeout(SILENCE_S * 2):
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


async def storm(
    system: System,
    asked: list[Question],
    streams: int,
    faults: list[Fault],
    minutes: float,
    say: Callable[[str], None],
    neighbour: Neighbour | None = None,
) -> Outcome:
    """Let the faults happen, each after the one before is mended unless it is to come at once.

    After so many minutes no more come.
    """
    outcome = Outcome()
    begin = time.monotonic()
    async with (
        answered(system, asked, BATCH, outcome.tally),
        clients(system, asked, streams, outcome) as found,
        neighbour.watched(system.served.url, outcome.tally) if neighbour else nullcontext(),
    ):
        await all_heard(found, since=0.0)
        outcome.calm = [await all_heard(found, time.monotonic()) for _ in range(CALM)]
        mending: list[asyncio.Task[None]] = []
        for fault in faults:
            if not fault.at_once:
                await asyncio.gather(*mending)
            if time.monotonic() - begin > 60 * minutes:
                break
            await asyncio.sleep(fault.wait)
            hit = Hit(fault, now := time.monotonic(), None, well=now + fault.lasts)
            outcome.hits.append(hit)
            await _happen(system, asked, hit, outcome)
            mending = [
                *(task for task in mending if not task.done()),
                asyncio.create_task(_mended(hit, found, say)),
            ]
        await asyncio.gather(*mending)
    outcome.leaks = await pages_held(system) + await left_over(system)
    outcome.seconds = time.monotonic() - begin
    return outcome


async def _mended(hit: Hit, found: list[Client], say: Callable[[str], None]) -> None:
    """Wait until every client is sent tokens again."""
    fault = hit.fault
    async with asyncio.timeout(RECOVERED_S):
        hit.recovered = await all_heard(found, hit.well)
    say(f"{fault.number + 1}: {fault.kind} {hit.told}: {hit.recovered:.1f} s".replace(" :", ":"))


async def left_over(system: System) -> list[str]:
    """Return what is leaked once all that was killed has been replaced, or has had its time."""
    end = time.monotonic() + _REPLACED_S
    while (found := system.leaks()) and time.monotonic() < end:
        await asyncio.sleep(0.5)
    return found


async def all_heard(found: Items[Heard], since: float) -> float:
    """Wait until every client is sent tokens after that moment; return the seconds it took."""
    waiting, last = list(found), since
    while waiting:
        for client in list(waiting):
            if client.heard > since + _ON_ITS_WAY_S:
                waiting.remove(client)
                last = max(last, client.heard)
        await asyncio.sleep(0.02)
    return last - since


async def _happen(system: System, asked: list[Question], hit: Hit, outcome: Outcome) -> None:
    fault = hit.fault
    match fault.kind.split()[0]:
        case "kill":
            hit.pid = system.hit(fault, signal.SIGKILL)
        case "pause":
            hit.pid = system.hit(fault, signal.SIGSTOP)
            await asyncio.sleep(fault.lasts)
            if hit.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(hit.pid, signal.SIGCONT)
        case "hang":
            hit.pid = system.hit(fault, signal.SIGSTOP)
            if hit.pid is not None:
                system.stopped.add(hit.pid)
        case "overload":
            hit.told = await _overload(system, asked, outcome)
            hit.well = time.monotonic()
        case _:
            await _hang_up(system, asked)
            hit.well = time.monotonic()
    hit.told = hit.told or (f"(process {hit.pid})" if hit.pid else "")


async def _overload(system: System, asked: list[Question], outcome: Outcome) -> str:
    """Ask for far more than there is room for; each must be answered or refused at once."""

    tally = outcome.tally

    async def one(http: httpx2.AsyncClient, body: dict[str, Any]) -> int:
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code == 429 and "retry-after" not in answer.headers:
            tally.bad("rude", "429 without Retry-After")
        return answer.status_code

    body = asked[0].body | {"max_tokens": 1, "stream": False}
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=system.served.url, limits=limits, timeout=60) as http:
        begin = time.monotonic()
        found = await asyncio.gather(
            *(one(http, body) for _ in range(_BURST)), return_exceptions=True
        )
    codes = [each for each in found if isinstance(each, int)]
    refused = sum(code in (429, 503) for code in codes)
    if not outcome.may_break(begin):
        for code in set(codes) - {200, 429, 503}:
            tally.bad("lost", f"status {code} under overload")
    return f"({len(codes) - refused} answered, {refused} refused, {time.monotonic() - begin:.1f} s)"


async def _hang_up(system: System, asked: list[Question], count: int = 8) -> None:
    """Begin answers and leave: nothing may be held for them."""

    async def one(http: httpx2.AsyncClient, question: Question) -> None:
        async with http.stream("POST", "/v1/completions", json=question.body) as answer:
            async for _ in answer.aiter_lines():
                return

    async with httpx2.AsyncClient(base_url=system.served.url, timeout=60) as http:
        await asyncio.gather(
            *(one(http, asked[n % len(asked)]) for n in range(count)), return_exceptions=True
        )


async def pages_held(system: System, patience: float = 30.0) -> list[str]:
    """Wait until no replica runs or holds anything; return what one holds after all."""
    calm, found = 0, dict[str, Any]()
    end = time.monotonic() + patience
    async with httpx2.AsyncClient(base_url=system.served.url, timeout=30) as http:
        while calm < 20:  # the proxy asks one replica and then another
            found = (await http.get("/load")).json()
            idle = not found["running"] and not found["waiting"]
            calm = calm + 1 if idle and found["free_pages"] == found["num_pages"] else 0
            if time.monotonic() > end:
                return [f"requests or pages: {found}"]
            await asyncio.sleep(0.02)
    return []
