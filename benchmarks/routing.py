"""Measures prefix routing against the least busy replica: two servers take turns at conversations.

    python -m benchmarks.routing

Each server has three replicas of the same model. Clients hold conversations, one turn after the
other, and think in between; all conversations share the system message. The hit rate is, of the
tokens that a conversation's earlier turns left on some replica, the share that later turns read.
Rounds are short, so that other work on the machine slows both servers alike; every round has
another seed, so that none finds the prefixes of another.
"""

import argparse
import asyncio
import random
import time
from functools import partial
from itertools import chain
from typing import NamedTuple

import httpx2

from benchmarks import load, paired
from benchmarks.load import Json
from benchmarks.serve_process import serve_process
from diffray.cluster.cli.bench import percentile

BLOCK = 32  # only whole blocks are shared
WORDS = "red green blue grey black white brown pink gold silver".split()
SYSTEM = {"role": "system", "content": "Answer in a few words."}


class Turn(NamedTuple):
    """The time of a later turn, and how many tokens of the earlier ones it read and could read."""

    seconds: float
    cached: int
    possible: int


async def conversation(http: httpx2.AsyncClient, drawn: random.Random, args: Json) -> list[Turn]:
    messages, before, turns = [SYSTEM], 0, []
    for number in range(args["turns"]):
        words = drawn.choices(WORDS, k=args["words"] if number == 0 else args["words"] // 8)
        messages = [*messages, {"role": "user", "content": " ".join(words)}]
        await asyncio.sleep(drawn.expovariate(1 / args["think"]))
        begin = time.perf_counter()
        answer = await load.chat(
            http, {"messages": messages, "max_tokens": args["max_tokens"], "ignore_eos": True}
        )
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append(Turn(time.perf_counter() - begin, min(cached, before), before))
        before = usage["prompt_tokens"] // BLOCK * BLOCK
        messages = [*messages, answer["choices"][0]["message"]]
    return turns


async def work(url: str, args: Json, seed: int) -> list[Turn]:
    """Hold all conversations, `clients` at a time; return their turns."""
    drawn = random.Random(seed)
    async with load.client(url) as http:

        async def one(body: Json) -> list[Turn]:
            return await conversation(http, random.Random(body["seed"]), args)

        bodies = [{"seed": drawn.random()} for _ in range(args["conversations"])]
        held = await load.all_of(bodies, args["clients"], one)
    return [turn for turns in held for turn in turns]


def hold(url: str, args: Json, number: int) -> list[Turn]:
    return asyncio.run(work(url, args, number))


def numbers(turns: list[Turn]) -> dict[str, float]:
    seconds = [turn.seconds for turn in turns]
    return {
        "hit rate": sum(turn.cached for turn in turns) / sum(turn.possible for turn in turns),
        "p50 s": percentile(seconds, 50),
        "p95 s": percentile(seconds, 95),
    }


def table(rounds: dict[str, list[list[Turn]]]) -> list[str]:
    """Return a row for each number: of all turns, their ratio, and the rounds' median ratio."""
    rows = [paired.head("", *rounds, "ratio", "median of the rounds' ratios (range)")]
    routed, plain = (numbers([*chain(*found)]) for found in rounds.values())
    for what in routed:
        ours, theirs = ([numbers(turns)[what] for turns in found] for found in rounds.values())
        cells = routed[what], plain[what], routed[what] / plain[what]
        rows.append(
            paired.row(what, *(f"{cell:.3f}" for cell in cells), paired.ratio(ours, theirs))
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-llada2")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--conversations", type=int, default=24, help="of a round")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--words", type=int, default=160, help="of a first question")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument(
        "--think", type=float, default=1.0, help="seconds between turns, on average"
    )
    parser.add_argument("--rounds", type=int, default=10)
    args = vars(parser.parse_args())
    flags = f"{args['model']} --replicas {args['replicas']} --device cpu --cpu-threads 1".split()
    with serve_process(*flags, "--prefix-routing") as routed, serve_process(*flags) as plain:
        for server in (routed, plain):
            server.wait_for(" is ready at ", 1)
        contenders = {
            "prefix routing": partial(hold, routed.url, args),
            "least busy replica": partial(hold, plain.url, args),
        }
        rounds = paired.take_turns(
            contenders, args["rounds"], describe=lambda turns: str(numbers(turns))
        )
    print(f"{args['clients']} clients, {args['rounds']} rounds")
    print("\n".join(table(rounds)))


if __name__ == "__main__":
    main()
