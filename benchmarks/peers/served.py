"""Compares servers: they take turns at the same prompts, sent by one client."""

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import load, paired
from benchmarks.peers import checkpoint, servers
from benchmarks.peers.environments import Environment
from benchmarks.peers.servers import OURS, Contender, Server

LEAST_REQUESTS = 4  # of a turn
HEAD = paired.head(
    *("concurrency", "server", "tokens/s", "diffray / it", "diffray with dual cache / it"),
    *("equal tokens", "equal answers"),
)
# dlmserve's counters of sequences' steps, and of the forwards that shared them.
COUNTERS = ("dlmserve_step_batch_size_sum", "dlmserve_step_batch_size_count")


def prompts(count: int, shortest: int, longest: int, seed: int) -> list[str]:
    """Return ragged prompts of random words."""
    draws = random.Random(seed)
    lengths = [draws.randint(shortest, longest) for _ in range(count)]
    return [
        " ".join(checkpoint.word(draws.randrange(checkpoint.ORDINARY)) for _ in range(size))
        for size in lengths
    ]


def body(contender: Contender, model: str, prompt: str, gen_length: int) -> dict[str, Any]:
    """Return the request; dlmserve refuses unknown fields."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": gen_length,
        "temperature": 0.0,
        "stream": True,
    } | contender.body


def turn_of(
    contender: Contender,
    started: dict[str, Server],
    texts: list[str],
    concurrency: int,
    gen_length: int,
) -> Callable[[int], paired.Turn]:
    """Return a contender that sends all prompts, and raises if an answer has another length."""
    server = started[contender.server]
    bodies = [body(contender, server.served, text, gen_length) for text in texts]

    async def send() -> list[load.Reply]:
        async with load.client(server.url) as http:
            return await load.all_of(bodies, concurrency, partial(load.streamed, http))

    def take(_: int) -> paired.Turn:
        with server.awake():
            begin = time.perf_counter()
            try:
                replies = asyncio.run(send())
            except (ValueError, httpx2.HTTPError) as error:
                raise ValueError(f"{contender.name} does not answer: {error}") from None
            seconds = time.perf_counter() - begin
        answers = [reply.text.split() for reply in replies]
        if wrong := [len(words) for words in answers if len(words) != gen_length]:
            raise ValueError(f"{contender.name} wrote {wrong} tokens instead of {gen_length}")
        return paired.Turn(seconds, answers)

    return take


def counters(started: dict[str, Server]) -> list[float]:
    """Return dlmserve's counters, if it runs."""
    if (server := started.get("dlmserve")) is None:
        return []
    with server.awake():
        text = httpx2.get(server.url + "/metrics", timeout=load.TIMEOUT_S).text
    return [counter(text, name) for name in COUNTERS]


def counter(metrics: str, name: str) -> float:
    """Return the sum of a counter's samples."""
    families = text_string_to_metric_families(metrics)
    return sum(each.value for family in families for each in family.samples if each.name == name)


def table_rows(
    concurrency: int, found: list[Contender], results: dict[str, list[paired.Turn]]
) -> list[str]:
    """Return a row for each contender; the others are compared with the first two."""
    first, cached = (results[contender.name] for contender in found[:2])
    rows = []
    for contender in found:
        turns = results[contender.name]
        cells = ["1" if base is turns else paired.speedup(base, turns) for base in (first, cached)]
        equal = ["another algorithm"] * 2
        if contender.same:
            equal = [paired.equal_tokens(first, turns), paired.equal_answers(first, turns)]
        rows.append(paired.row(concurrency, contender.name, paired.rate(turns), *cells, *equal))
    return rows


def compare(peers: list[str], args: argparse.Namespace, made: dict[str, Environment]) -> None:
    """Start the servers and print the table, then how many rows share dlmserve's forwards."""
    code = checkpoint.code_folder(args.fast_dllm, checkpoint.LLADA_CODE)
    model = args.folder.resolve() / f"llada-{args.hidden}x{args.layers}-{args.seed}"
    if not (model / "tokenizer_config.json").is_file():
        sizes = {"layers": args.layers, "hidden": args.hidden, "seed": args.seed}
        checkpoint.write_llada(model, code, **sizes)
    setting = servers.Setting(
        model, args.threads, args.gen_length, args.steps, max(args.concurrency)
    )
    contenders = servers.contenders(setting, peers, args.block_length)
    shortest, longest = args.prompt_length
    print(
        f"{model.name}, float32, {args.threads} threads, prompts of"
        f" {shortest} to {longest} tokens, {args.gen_length} new tokens"
        f" in {args.steps} steps, {args.turns} turns"
    )
    print(HEAD, flush=True)
    with ExitStack() as stack:
        started = {OURS: stack.enter_context(servers.our_server(setting))}
        for name in peers:
            server = servers.peer_server(name, setting, made[name], args.folder / "logs")
            started[name] = stack.enter_context(server)
        notes = []
        for concurrency in args.concurrency:
            count = args.requests or max(LEAST_REQUESTS, concurrency)
            texts = prompts(count, shortest, longest, args.seed)
            before = counters(started)
            results = paired.take_turns(
                {
                    each.name: turn_of(each, started, texts, concurrency, args.gen_length)
                    for each in contenders
                },
                args.turns,
                describe=lambda turn: f"{turn.rate:.2f} tokens/s",
            )
            print("\n".join(table_rows(concurrency, contenders, results)), flush=True)
            if then := counters(started):
                rows, forwards = (new - old for new, old in zip(then, before, strict=True))
                note = f"{rows / forwards:.2f} rows a forward"
                notes.append(f"dlmserve at concurrency {concurrency}: {note}")
    print("\n".join(notes), flush=True)
