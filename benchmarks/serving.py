"""Measures what serving costs: the same requests to the engine in process and to `diffray serve`.

    python -m benchmarks.serving --haproxy

One model has one rank with one thread; requests run once as a warm-up. The JSON report has: tokens
per second, measured in alternating order, of the engine that has all requests from the start
(`DiffusionLLM`), of the API's service in one process with it (`LocalEngine`), and over HTTP; how
fast /health answers meanwhile; how long after the first final block a stream's first text arrives;
the memory of each process; the time of each hop of a request; and what a round costs at several
steps per round, with one and with two rounds in flight.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import load, paired
from benchmarks.load import Json
from benchmarks.serve_process import ServeProcess, serve_process
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.api.service import Service
from diffray.cluster.cli.bench import percentile
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.local import load_local
from diffray.workers.admission import check_request
from diffray.workers.messages import Request

if TYPE_CHECKING:  # it imports Ray, whose settings must be made first
    from diffray.cluster.control.remote import RemoteEngine


def alone(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Measure in a fresh process, which ends before the server is measured."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as child:
        return child.submit(measure, *arguments).result()


def params_of(body: Json) -> SamplingParams:
    return SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True)


def engine_rate(model: str, bodies: list[Json], concurrency: int) -> float:
    """Return tokens per second of `DiffusionLLM`, which has all requests from the start."""
    chats = [body["messages"] for body in bodies]
    with DiffusionLLM(model, device="cpu", cpu_threads=1, max_num_seqs=concurrency) as llm:
        for _ in range(2):
            begin = time.perf_counter()
            answers = llm.chat(chats, params_of(bodies[0]), use_tqdm=False)
            seconds = time.perf_counter() - begin
    return sum(answer.completion_tokens for answer in answers) / seconds


def local_rate(model: str, bodies: list[Json], concurrency: int) -> float:
    """Return tokens per second of the API's `Service` over an engine in its process."""

    async def run() -> float:
        config = EngineConfig(max_num_seqs=concurrency, steps_per_round=1, cpu_threads=1)
        engine, tokenizer = load_local(model, config)
        service = Service(engine, tokenizer, (model,))
        with engine:
            await load.rate(bodies, concurrency, service.chat)
            return await load.rate(bodies, concurrency, service.chat)

    return asyncio.run(run())


def first_blocks(model: str, bodies: list[Json]) -> list[float]:
    """Return the seconds until the engine, without any server, has final text."""
    seconds = []
    with DiffusionLLM(model, device="cpu", cpu_threads=1) as llm:
        for body in bodies[:1] + bodies:
            begin = time.perf_counter()
            stream: Any = llm.stream(body["messages"], params_of(body))
            next(delta for delta in stream if delta.text)
            seconds.append(time.perf_counter() - begin)
            stream.close()
    return seconds[1:]


async def served(url: str, bodies: list[Json], concurrency: int, health: list[float]) -> float:
    """Return tokens per second over HTTP; add the seconds of each /health request meanwhile."""
    async with load.client(url) as http:

        async def watch() -> None:
            while True:
                begin = time.perf_counter()
                (await http.get("/health")).raise_for_status()
                health.append(time.perf_counter() - begin)
                await asyncio.sleep(0.1)

        send = partial(load.chat, http)
        await load.rate(bodies, concurrency, send)
        watching = asyncio.create_task(watch())
        speed = await load.rate(bodies, concurrency, send)
        watching.cancel()
    return speed


async def streams(url: str, bodies: list[Json]) -> list[load.Reply]:
    """Return the streamed answers, one request at a time."""
    async with load.client(url) as http:
        return [await load.streamed(http, body) for body in bodies]


def first_text(model: str, url: str, bodies: list[Json]) -> Json:
    """Compare streams with the engine alone, question by question: serving adds the difference."""
    blocks = alone(first_blocks, model, bodies)
    replies = asyncio.run(streams(url, bodies[:1] + bodies))[1:]
    texts = [reply.chunks_s[0] for reply in replies]
    added = [text - block for text, block in zip(texts, blocks, strict=True)]
    return {
        "engine's first block": in_ms(blocks),
        "client's headers": in_ms([reply.headers_s for reply in replies]),
        "client's first text": in_ms(texts),
        "client's last text": in_ms([reply.chunks_s[-1] for reply in replies]),
        "end of the stream": in_ms([reply.end_s for reply in replies]),
        "added to the first text": in_ms(added),
    }


def in_ms(seconds: list[float]) -> Json:
    names = {"p50 ms": 50, "p90 ms": 90, "max ms": 100}
    found: Json = {name: round(1e3 * percentile(seconds, p), 1) for name, p in names.items()}
    return found | {"count": len(seconds)}


def memory(server: ServeProcess) -> dict[str, float]:
    """Return the proportional share of memory of each of Ray's processes, in MB."""
    found = {}
    for pid, name in server.processes().items():
        if name.startswith("ray::"):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            share = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            found[f"{name} {pid}"] = round(share / 1024, 1)
    return found


async def median_ms(act: Callable[[], Coroutine[Any, Any, object]]) -> float:
    seconds = []
    for _ in range(50):
        begin = time.perf_counter()
        await act()
        seconds.append(time.perf_counter() - begin)
    return round(1e3 * median(seconds), 2)


async def replica_hop(url: str) -> float:
    async with load.client(url) as http:
        return await median_ms(lambda: http.get("/version"))


@asynccontextmanager
async def one_rank(
    model: str, config: EngineConfig, params: SamplingParams
) -> AsyncIterator["tuple[RemoteEngine, Callable[[], Coroutine[Any, Any, None]]]"]:
    """Yield a coordinator with one rank, and a function that runs one request to its end."""
    from diffray.cluster.control.remote import RemoteEngine

    engine = await RemoteEngine.start(model, config, [{"CPU": 1}] * 2)
    uids = count()

    async def request() -> None:
        given = Request(next(uids), tuple(range(10, 40)), params)
        async for _ in engine.submit(check_request(given, engine.limits)):
            pass

    try:
        await request()
        yield engine, request
    finally:
        await engine.close()


async def hops(model: str) -> Json:
    """Return the milliseconds of each hop of a request that takes one round: medians of 50."""
    params = SamplingParams(max_tokens=32, diffusion={"decoder": {"kind": "fixed", "steps": 1}})
    async with one_rank(model, EngineConfig(cpu_threads=1), params) as (engine, request):
        coordinator = await median_ms(engine.load)
        before = (await engine.load()).worked
        whole = await median_ms(request)
        step = round(1e3 * ((await engine.load()).worked - before) / 50, 2)
    return {
        "replica to coordinator and back": coordinator,
        "one round in the rank": step,
        "coordinator to rank and back, and the events to the replica": round(
            whole - step - coordinator, 2
        ),
        "submit to answer, all of it": whole,
    }


async def rounds(model: str, steps: int, flying: int) -> Json:
    """Return what a round costs between the coordinator and one rank, with eight requests."""
    config = EngineConfig(
        max_num_seqs=8, steps_per_round=steps, rounds_in_flight=flying, cpu_threads=1
    )
    decoder = {"kind": "fixed", "steps": 96}
    params = SamplingParams(max_tokens=96, ignore_eos=True, diffusion={"decoder": decoder})
    async with one_rank(model, config, params) as (engine, request):
        before = await engine.load()
        await asyncio.gather(*(request() for _ in range(8)))
        after = await engine.load()
    forwards = after.forwards - before.forwards
    worked, waited = after.worked - before.worked, after.waited - before.waited
    return {
        "steps": steps,
        "in_flight": flying,
        "rounds": after.rounds - before.rounds,
        "forwards": forwards,
        "work_ms_per_step": round(1e3 * worked / forwards, 3),
        "wait_ms_per_step": round(1e3 * waited / forwards, 3),
        "wait_share": round(waited / (waited + worked), 4),
    }


def compare(server: ServeProcess, model: str, bodies: list[Json], args: argparse.Namespace) -> Json:
    """Return the part of the report that needs the server."""
    work, health = (bodies, args.concurrency), list[float]()
    turns = paired.take_turns(
        {
            "engine": lambda _: float(alone(engine_rate, model, *work)),
            "local": lambda _: float(alone(local_rate, model, *work)),
            "served": lambda _: asyncio.run(served(server.url, *work, health)),
        },
        args.repeat,
        describe=lambda rate: f"{rate:.1f} tokens/s",
    )
    return {
        "tokens_per_second": {name: round(median(rates), 1) for name, rates in turns.items()},
        "served_over_engine": paired.ratio(turns["served"], turns["engine"]),
        "served_over_local": paired.ratio(turns["served"], turns["local"]),
        "health": in_ms(health),
        "first_text": first_text(model, server.url, bodies),
        "memory_mb": memory(server),
        "hops_ms": {
            "client to replica and back (GET /version)": asyncio.run(replica_hop(server.url))
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--port", type=int, default=18321)
    parser.add_argument("--haproxy", action=argparse.BooleanOptionalAction, default=False)
    args = parser.parse_args()
    # The server runs in another folder.
    model = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    flags = [model, "--device", "cpu", "--cpu-threads", "1", "--max-num-seqs", args.concurrency]
    flags += ["--haproxy" if args.haproxy else "--no-haproxy"]
    bodies = load.chats(args.requests, args.max_tokens)
    report: Json = {"model": args.model, "concurrency": args.concurrency}
    with serve_process(*map(str, flags), port=args.port) as server:
        server.wait_for("/v1", 1)
        report |= compare(server, model, bodies, args)

    from benchmarks.local_ray import local_cluster

    with local_cluster([{"num_cpus": 4}]):
        report["hops_ms"] |= asyncio.run(hops(model))
        report["rounds"] = [
            asyncio.run(rounds(model, steps, flying)) for steps in (1, 4, 8) for flying in (1, 2)
        ]
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
