"""Compares servers under the same load: flags of `diffray serve`, or this checkout and another.

    python -m benchmarks.serving "" RAY_SERVE_ENABLE_HA_PROXY=1
    python -m benchmarks.serving "" PYTHONPATH=/path/to/another/checkout
    python -m benchmarks.serving --conversations --at-once 24 --model demo-llada2 \
        "--replicas 3 --cpu-threads 1" "--replicas 3 --cpu-threads 1 --prefix-routing"

A server is a quoted list of flags; NAME=VALUE is a variable of its environment. Servers start one
after the other and are idle but for their turn. By default that is held-out questions of the demo
models, streamed, with all answers of one length. With `--conversations` clients ask one question
after the other, and think in between; all share the system message. The hit rate is, of the tokens
that a conversation's earlier questions left on some replica, the share that later ones read. Every
turn has other conversations, so that none finds the prefixes of another.

Processor seconds are those of all of a server's processes. The last table has the seconds until a
server is ready, its processes, and their share of memory.
"""

import argparse
import asyncio
import random
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx2

from benchmarks import load, paired
from diffray.cluster.cli.bench import percentile
from examples.train_demo.tasks import held_out_items
from tools.serve_process import ServeProcess, serve_process

Numbers = dict[str, float]  # what was measured in a turn, by its column

VARIABLE = re.compile(r"\w+=")
BLOCK = 32  # only whole blocks are shared
WORDS = "red green blue grey black white brown pink gold silver".split()
SYSTEM = {"role": "system", "content": "Answer in a few words."}


class Later(NamedTuple):
    """The time of a later question, and how many tokens of earlier ones it read and could read."""

    seconds: float
    cached: int
    possible: int


def user(text: str) -> load.Json:
    return {"role": "user", "content": text}


def asked(messages: list[load.Json], args: argparse.Namespace) -> load.Json:
    """Return a request, whose answer has as many tokens as any other."""
    return {"messages": messages, "max_tokens": args.max_tokens, "ignore_eos": True}


def stream(server: ServeProcess, args: argparse.Namespace, at_once: int, _: int) -> Numbers:
    """Stream answers to all questions, so many at once."""
    items = held_out_items(max(args.requests, at_once), seed=7)
    bodies = [asked([user(item.question)], args) for item in items]
    worked, begin = server.processor_seconds(), time.perf_counter()
    replies = load.answers(server.url, bodies, at_once, load.streamed)
    seconds, worked = time.perf_counter() - begin, server.processor_seconds() - worked
    tokens = len(replies) * args.max_tokens
    return {
        "tokens/s": tokens / seconds,
        "tokens per processor s": tokens / worked,
        "first text, s": median(each.chunks_s[0] for each in replies),
    }


def converse(server: ServeProcess, args: argparse.Namespace, at_once: int, turn: int) -> Numbers:
    """Hold conversations, so many at once."""
    drawn = random.Random(turn)
    bodies = [{"seed": drawn.random()} for _ in range(at_once)]
    held = load.answers(server.url, bodies, at_once, partial(conversation, args))
    every = [later for found in held for later in found]
    seconds = [each.seconds for each in every]
    return {
        "hit rate": sum(each.cached for each in every) / sum(each.possible for each in every),
        "p50, s": percentile(seconds, 50),
        "p95, s": percentile(seconds, 95),
    }


async def conversation(
    args: argparse.Namespace, http: httpx2.AsyncClient, body: load.Json
) -> list[Later]:
    drawn = random.Random(body["seed"])
    messages, before, found = [SYSTEM], 0, []
    for number in range(args.questions):
        words = drawn.choices(WORDS, k=args.words if number == 0 else args.words // 8)
        messages = [*messages, user(" ".join(words))]
        await asyncio.sleep(drawn.expovariate(1 / args.think))
        begin = time.perf_counter()
        answer = await load.chat(http, asked(messages, args))
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        found.append(Later(time.perf_counter() - begin, min(cached, before), before))
        before = usage["prompt_tokens"] // BLOCK * BLOCK
        messages = [*messages, answer["choices"][0]["message"]]
    return found


def memory_mb(server: ServeProcess) -> float:
    """Return the proportional share of memory of all processes."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in server.processes()]
    shares = [re.search(r"Pss:\s+(\d+)", rollup) for rollup in rollups]
    return sum(int(share[1]) for share in shares if share) / 1024


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
    parser.add_argument("--conversations", action="store_true", help="instead of single questions")
    parser.add_argument("--questions", type=int, default=4, help="of a conversation")
    parser.add_argument("--words", type=int, default=160, help="of its first question")
    parser.add_argument("--think", type=float, default=1.0, help="mean seconds between questions")
    args, servers = parser.parse_known_args()
    work = converse if args.conversations else stream
    with ExitStack() as stack:
        running = {text: started(stack, text, args) for text in servers or [""]}

        def contender(server: ServeProcess) -> Callable[[int], list[Numbers]]:
            return lambda turn: [work(server, args, at_once, turn) for at_once in args.at_once]

        contenders = {
            text or "defaults": contender(server) for text, (server, _) in running.items()
        }
        found = paired.take_turns(contenders, args.turns)
        held = {
            text: (memory_mb(server), len(server.processes()))
            for text, (server, _) in running.items()
        }
    for place, at_once in enumerate(args.at_once):
        print(f"\n{at_once} at once:\n")
        own = {text: [turn[place] for turn in turns] for text, turns in found.items()}
        print(paired.table("server", own, paired.figures(next(iter(own.values()))[0])))
    print()
    print(paired.head("server", "ready, s", "processes", "memory, MB"))
    for text, (_, seconds) in running.items():
        megabytes, processes = held[text]
        print(paired.row(text or "defaults", f"{seconds:.1f}", processes, f"{megabytes:.0f}"))


if __name__ == "__main__":
    main()
