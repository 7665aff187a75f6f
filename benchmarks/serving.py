"""What serving costs: `python -m benchmarks.serving`, the engine in process and behind Serve.

One model, one rank with one thread, the same requests, asked once before they count: tokens per
second at a concurrency, of the engine that has them all from the start (`DiffusionLLM`), of the
HTTP layer's insides in one process with it (`LocalEngine`), and over HTTP, in alternating order;
what a round costs at several steps a round, with one and with two rounds in flight; where the time
of one streamed request goes, and how long after the first final block its first text arrives; how
fast /health answers meanwhile; the memory of each process.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import load, paired
from benchmarks.load import Json
from diffray.cluster.api.service import Service
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.local import load_local
from diffray.cluster.serve.environment import prepare_server
from diffray.components.params import SamplingParams
from diffray.workers.admission import check_request
from diffray.workers.messages import Request

if TYPE_CHECKING:  # it imports Ray, whose settings are made first
    from diffray.cluster.control.remote import RemoteEngine


def bodies(number: int, max_tokens: int) -> list[Json]:
    """Return chats of the kind that the demo models know."""
    from examples.train_demo.tasks import held_out_items

    return [
        {
            "messages": [{"role": "user", "content": item.question}],
            "max_tokens": max_tokens,
            "ignore_eos": True,  # equally long answers, so that runs compare
        }
        for item in held_out_items(number, seed=7)
    ]


async def tokens_per_second(
    asked: list[Json], concurrency: int, ask: Callable[[Json], Coroutine[Any, Any, Json]]
) -> float:
    """Return the rate with so many requests under way at once."""
    begin = time.perf_counter()
    answers = await load.all_of(asked, concurrency, ask)
    return load.written(answers) / (time.perf_counter() - begin)


def in_process(model: str, asked: list[Json], concurrency: int) -> float:
    """Return tokens per second of the engine in a process of its own, with one thread."""
    import torch

    torch.set_num_threads(1)

    async def run() -> float:
        config = EngineConfig(max_num_seqs=concurrency, steps_per_round=1)
        engine, tokenizer = load_local(model, config)
        service = Service(engine, tokenizer, (model,))
        with engine:
            await tokens_per_second(asked, concurrency, service.chat)
            return await tokens_per_second(asked, concurrency, service.chat)

    return asyncio.run(run())


def engine_alone(model: str, asked: list[Json], concurrency: int) -> float:
    """Return tokens per second where nobody serves: all questions at once, so many at a time."""
    import torch

    from diffray import DiffusionLLM, SamplingParams

    torch.set_num_threads(1)
    wish = SamplingParams(max_tokens=asked[0]["max_tokens"], ignore_eos=True)
    questions = [body["messages"] for body in asked]
    with DiffusionLLM(model, device="cpu", max_num_seqs=concurrency) as llm:
        llm.chat(questions, wish, use_tqdm=False)
        begin = time.perf_counter()
        answers = llm.chat(questions, wish, use_tqdm=False)
        seconds = time.perf_counter() - begin
    return sum(answer.completion_tokens for answer in answers) / seconds


def first_blocks(model: str, asked: list[Json]) -> list[float]:
    """Return the milliseconds after which the engine, without any server, has final text."""
    import torch

    from diffray import DiffusionLLM, SamplingParams

    torch.set_num_threads(1)
    times = []
    with DiffusionLLM(model, device="cpu") as llm:
        for body in asked[:1] + asked:
            wish = SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True)
            begin = time.perf_counter()
            stream: Any = llm.stream(body["messages"], wish)
            next(delta for delta in stream if delta.text)
            times.append(1e3 * (time.perf_counter() - begin))
            stream.close()
    return times[1:]


def alone(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Measure in a fresh process, so that nothing of it stays beside the server."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as child:
        return child.submit(measure, *arguments).result()


async def served(url: str, asked: list[Json], concurrency: int) -> tuple[float, list[float]]:
    """Return tokens per second over HTTP, and the milliseconds of each /health meanwhile."""
    times: list[float] = []
    async with load.client(url) as http:
        ask = partial(load.chat, http)

        async def watch() -> None:
            while True:
                begin = time.perf_counter()
                (await http.get("/health")).raise_for_status()
                times.append(1e3 * (time.perf_counter() - begin))
                await asyncio.sleep(0.1)

        await load.all_of(asked, concurrency, ask)
        watching = asyncio.create_task(watch())
        speed = await tokens_per_second(asked, concurrency, ask)
        watching.cancel()
    return speed, times


async def streams(url: str, asked: list[Json]) -> list[load.Reply]:
    """Return the streamed answers, one request at a time."""
    async with load.client(url) as http:
        return [await load.streamed(http, body) for body in asked]


def one_stream(url: str, body: Json) -> Json:
    """Return the milliseconds of one streamed request: to the headers, each chunk, the end."""
    (reply,) = asyncio.run(streams(url, [body]))
    return {
        "headers_ms": round(1e3 * reply.headers_s, 1),
        "chunks_ms": [round(1e3 * chunk, 1) for chunk in reply.chunks_s],
        "end_ms": round(1e3 * reply.end_s, 1),
    }


def first_text(model: str, url: str, asked: list[Json]) -> Json:
    """Compare both, question by question: the last three are what serving adds."""
    blocks = alone(first_blocks, model, asked)
    replies = asyncio.run(streams(url, asked[:1] + asked))[1:]
    texts = [1e3 * reply.chunks_s[0] for reply in replies]
    added = sorted(text - block for text, block in zip(texts, blocks, strict=True))
    return {
        "engine's first block, p50 ms": round(statistics.median(blocks), 1),
        "client's first text, p50 ms": round(statistics.median(texts), 1),
        "added, p50 ms": round(statistics.median(added), 1),
        "added, p90 ms": round(added[int(0.9 * len(added))], 1),
        "added, max ms": round(added[-1], 1),
    }


@asynccontextmanager
async def one_rank(
    model: str, config: EngineConfig, wish: SamplingParams
) -> AsyncIterator["tuple[RemoteEngine, Callable[[], Coroutine[Any, Any, None]]]"]:
    """Yield a coordinator with one rank, and what asks it for an answer and waits for its end."""
    from diffray.cluster.control.remote import RemoteEngine

    engine = await RemoteEngine.start(model, config, [{"CPU": 1}] * 2)
    uids = count()

    async def ask() -> None:
        request = Request(next(uids), tuple(range(10, 40)), wish)
        async for _ in engine.submit(check_request(request, engine.limits)):
            pass

    try:
        await ask()
        yield engine, ask
    finally:
        await engine.close()


async def rounds(model: str, steps: int, flying: int, asked: int) -> Json:
    """Return what a round costs between the coordinator and one rank."""
    config = EngineConfig(
        max_num_seqs=8, steps_per_round=steps, rounds_in_flight=flying, cpu_threads=1
    )
    decoder = {"kind": "fixed", "steps": 96}
    wish = SamplingParams(max_tokens=96, ignore_eos=True, diffusion={"decoder": decoder})
    async with one_rank(model, config, wish) as (engine, ask):
        before = await engine.load()
        await asyncio.gather(*(ask() for _ in range(asked)))
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


async def median_ms(act: Callable[[], Coroutine[Any, Any, object]]) -> float:
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        await act()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


async def hops(model: str, url: str) -> Json:
    """Return the milliseconds of each hop of a request that one round answers: medians of 50."""
    found: Json = {}
    async with load.client(url) as http:
        found["client to replica and back (GET /version)"] = await median_ms(
            lambda: http.get("/version")
        )
    wish = SamplingParams(max_tokens=32, diffusion={"decoder": {"kind": "fixed", "steps": 1}})
    async with one_rank(model, EngineConfig(cpu_threads=1), wish) as (engine, ask):
        found["replica to coordinator and back"] = await median_ms(engine.load)
        before = (await engine.load()).worked
        whole = await median_ms(ask)
        step = 1e3 * ((await engine.load()).worked - before) / 50
    found["one round in the rank"] = step
    found["coordinator to rank and back, and the events to the replica"] = (
        whole - step - found["replica to coordinator and back"]
    )
    found["submit to answer, all of it"] = whole
    return {name: round(value, 2) for name, value in found.items()}


def memory() -> dict[str, float]:
    """Return the proportional share of memory of each Ray process of this session, in MB."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            name = (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
            if not name.startswith("ray::"):
                continue
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except (OSError, ValueError):
            continue
        share = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        found[f"{name} {folder.name}"] = round(share / 1024, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--port", type=int, default=18321)
    parser.add_argument("--haproxy", action="store_true")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    proxy_folder = tempfile.TemporaryDirectory(prefix="diffray-haproxy-", dir="/tmp")
    prepare_server(["/"], haproxy=Path(proxy_folder.name) if arguments.haproxy else None)
    import ray
    from ray import serve

    from diffray.cluster.serve.app import build

    asked = bodies(arguments.requests, arguments.max_tokens)
    url = f"http://127.0.0.1:{arguments.port}"
    report: Json = {"model": arguments.model, "concurrency": arguments.concurrency}
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, _temp_dir=folder,
            log_to_driver=False,
        )  # fmt: skip
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
        config = {
            "model_loading_config": {"model_id": arguments.model},
            "engine_kwargs": {
                "device": "cpu", "cpu_threads": 1, "max_num_seqs": arguments.concurrency
            },
        }  # fmt: skip
        serve.run(build(config), logging_config=quiet)
        health: list[float] = []

        def over_http(_: int) -> float:
            rate, times = asyncio.run(served(url, asked, arguments.concurrency))
            health.extend(times)
            return rate

        sizes = arguments.model, asked, arguments.concurrency
        turns = paired.take_turns(
            {
                "engine": lambda _: alone(engine_alone, *sizes),
                "local": lambda _: alone(in_process, *sizes),
                "served": over_http,
            },
            arguments.repeat,
            tell=lambda rate: f"{rate:.1f} tokens/s",
        )
        report["tokens_per_second"] = {
            name: round(statistics.median(rates), 1) for name, rates in turns.items()
        }
        for name in ("engine", "local"):
            report[f"served_over_{name}"] = paired.ratio(turns["served"], turns[name])
        health.sort()
        report["health_ms"] = {
            "p50": round(statistics.median(health), 1), "max": round(health[-1], 1),
            "count": len(health),
        }  # fmt: skip
        report["one_stream"] = one_stream(url, asked[0] | {"ignore_eos": False})
        report["first_text"] = first_text(arguments.model, url, asked)
        report["memory_mb"] = memory()
        report["hops_ms"] = asyncio.run(hops(arguments.model, url))
        serve.delete("default")
        report["rounds"] = [
            asyncio.run(rounds(arguments.model, steps, flying, 8))
            for steps in (1, 4, 8)
            for flying in (1, 2)
        ]
        ray.shutdown()
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
