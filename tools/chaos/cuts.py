"""Chaos between two nodes: `python -m tools.chaos.cuts --faults 20 --streams 16 --seed 7`.

A worker group with a rank on each of two nodes answers streams whose tokens are known; its network
is cut for a moment, or for longer than `heartbeat_timeout_s`, and ranks and the coordinator are
killed, also while it is cut, as the seed says. It needs root, and ends with status 1 if an answer
was lost, altered or doubled, or pages were not free afterwards.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.remote import RemoteEngine
from diffray.components.params import SamplingParams
from diffray.workers.admission import check_request
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_engine
from tools.chaos.cable import Cable, two_nodes
from tools.chaos.faults import Fault
from tools.chaos.report import as_text, passed
from tools.chaos.run import CALM, RECOVERED_S, Hit, Outcome, all_heard

HANG_S = 5.0
KINDS: dict[str, tuple[float, float]] = {  # and how long the cable is cut
    "cut for a moment": (0.3, 2.5),
    "cut for long": (HANG_S + 1, HANG_S + 6),
    "kill rank": (0, 0),
    "kill coordinator": (0, 0),
    "kill rank while cut": (0.5, HANG_S + 3),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the tokens that a quiet engine gives."""

    prompt: tuple[int, ...]
    params: SamplingParams
    ids: list[int]


def questions(model: str, number: int, tokens: int, seed: int) -> list[Question]:
    """Return greedy and seeded requests, each answered alone by an engine of this process."""
    draw = random.Random(seed)
    engine = build_engine(model, EngineOptions(dtype="float64", max_num_seqs=1))
    found = []
    for uid in range(number):
        prompt = tuple(draw.randrange(10, 400) for _ in range(draw.randint(4, 40)))
        params = SamplingParams(
            max_tokens=tokens - uid,
            ignore_eos=True,
            temperature=0.8 * (uid % 2),
            seed=uid,
            diffusion={"block_length": 8, "decoder": {"kind": "fixed", "steps": tokens // 2}},
        )
        engine.add(Request(uid, prompt, params))
        ids: list[int] = []
        while not engine.idle:
            for update in engine.step():
                ids += update.ids
        found.append(Question(prompt, params, ids))
    return found


@dataclass(slots=True)
class Client:
    """Asks one question after the other, and checks every token as it comes."""

    number: int
    engine: RemoteEngine
    asked: list[Question]
    outcome: Outcome
    uids: "count[int]"
    heard: float = 0.0
    ids: list[int] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        draw, tally = random.Random(f"client {self.number}"), self.outcome.tally
        while not stop.is_set():
            question = draw.choice(self.asked)
            tally.counts["asked"] += 1
            begin, self.ids = time.monotonic(), []
            try:
                await self._ask(question)
            except Exception as error:
                tally.bad("lost", f"client {self.number}: {type(error).__name__}: {error}")
                continue
            if self.ids == question.ids:
                tally.counts["right"] += 1
            elif len(self.ids) < len(question.ids):
                tally.bad("lost", f"client {self.number}: {len(self.ids)} tokens and no error")
            now = time.monotonic()
            tally.latencies.append((now, now - begin))

    async def _ask(self, question: Question) -> None:
        request = Request(next(self.uids), question.prompt, question.params)
        async for update in self.engine.submit(check_request(request, self.engine.limits)):
            if update.ids:
                self.heard = time.monotonic()
                self.outcome.tally.check(self.number, self.ids, update.ids, question.ids)


def schedule(number: int, seed: int) -> list[Fault]:
    """Return so many faults; each kind comes once before chance decides."""
    draw = random.Random(seed)
    kinds = draw.sample(list(KINDS), k=len(KINDS)) + draw.choices(list(KINDS), k=number)
    return [
        Fault(at, kind, draw.uniform(0.5, 2.0), False, draw.random(), draw.uniform(*KINDS[kind]))
        for at, kind in enumerate(kinds[:number])
    ]


async def happen(fault: Fault, engine: RemoteEngine, cable: Cable) -> str:
    """Let it happen; returns when the cable is whole again."""
    told = ""
    coordinator, *ranks = await engine.pids()
    pid = coordinator if "coordinator" in fault.kind else None
    if "rank" in fault.kind:
        pid = ranks[int(fault.pick * len(ranks))]
    if fault.lasts:
        await asyncio.to_thread(cable.cut)
    try:
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            told = f"(process {pid})"
        await asyncio.sleep(fault.lasts)
    finally:
        if fault.lasts:
            await asyncio.to_thread(cable.mend)
            told += f"(cut for {fault.lasts:.1f} s)"
    return told


async def storm(
    cable: Cable,
    model: str,
    asked: list[Question],
    streams: int,
    faults: list[Fault],
    say: Callable[[str], None],
) -> Outcome:
    """Let the faults happen one by one, each after the one before is mended."""
    config = EngineConfig(
        tensor_parallel_size=2,
        dtype="float64",
        device="cpu",
        cpu_threads=1,
        max_num_seqs=streams,
        check_every=16,
        heartbeat_timeout_s=HANG_S,
        max_restarts=1000,
    )
    outcome, stop, begin = Outcome(), asyncio.Event(), time.monotonic()
    engine = await RemoteEngine.start(model, config, [{"CPU": 1}] * 3)
    uids = count()
    found = [Client(number, engine, asked, outcome, uids) for number in range(streams)]
    tasks = [asyncio.create_task(client.run(stop)) for client in found]
    try:
        await all_heard(found, since=0.0)
        outcome.calm = [await all_heard(found, time.monotonic()) for _ in range(CALM)]
        for fault in faults:
            await asyncio.sleep(fault.wait)
            hit = Hit(fault, time.monotonic(), None, well=0.0)
            outcome.hits.append(hit)
            hit.told = await happen(fault, engine, cable)
            hit.well = time.monotonic()
            async with asyncio.timeout(RECOVERED_S):
                hit.recovered = await all_heard(found, hit.well)
            say(f"{fault.number + 1}: {fault.kind} {hit.told}: {hit.recovered:.1f} s")
        stop.set()
        async with asyncio.timeout(RECOVERED_S):
            await asyncio.gather(*tasks)
        load = await engine.load()
        if load.running or load.waiting or load.free_pages != load.num_pages:
            outcome.leaks.append(f"requests or pages: {load}")
    finally:
        for task in tasks:
            task.cancel()
        await engine.close()
    outcome.seconds = time.monotonic() - begin
    return outcome


def chaos(model: str, faults: int, streams: int, tokens: int, seed: int) -> Outcome:
    """Start two nodes, hurt, end; returns what was found."""
    asked = questions(model, 6, tokens, seed)
    with two_nodes() as cable:
        return asyncio.run(storm(cable, model, asked, streams, schedule(faults, seed), _say))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--model", default="demo")
    given = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("ip") is None:
        parser.error("a network namespace takes root and the command ip (iproute2)")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcome = chaos(given.model, given.faults, given.streams, given.tokens, given.seed)
    print(as_text(outcome, "python -m tools.chaos.cuts " + " ".join(sys.argv[1:])))
    sys.exit(0 if passed(outcome) else 1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
