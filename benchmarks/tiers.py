"""Measures what keeping prefixes on the host gains if the K/V cache cannot hold all of them.

    python -m benchmarks.random_checkpoint /tmp/llada2-100m --layout llada2_moe
    python -m benchmarks.tiers --threads 1 --cpu-time /tmp/llada2-100m

Conversations take turns: before the next question of one, all others ask theirs. Three engines with
the same weights answer them: one whose K/V cache has room for a few conversations, one that also
has `swap_space` for the others, and one that has room for all of them.
"""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.datasets import random_ids
from diffray.workers.messages import Request


class Talk(NamedTuple):
    """All conversations of one turn of the comparison."""

    rows: list[list[int]]  # the answers
    firsts: list[float]  # seconds to the first text of a later question
    cached: int  # tokens of later questions' prompts that were cached
    asked: int  # all tokens of these prompts


def talk(llm: DiffusionLLM, args: argparse.Namespace, clock: paired.Clock, seed: int) -> Talk:
    histories = random_ids(llm, args.conversations, args.first, seed)
    questions = random_ids(llm, args.conversations * args.questions, args.own, seed + 1)
    found = Talk([], [], 0, 0)
    for number in range(args.questions):
        for history in histories:
            if number:
                history += questions.pop()
            ids, cached, first = answer(llm, history, args.answer, clock)
            found.rows.append(ids)
            if number:
                found.firsts.append(first)
                found = found._replace(
                    cached=found.cached + cached, asked=found.asked + len(history)
                )
            history += ids
    return found


def answer(
    llm: DiffusionLLM, prompt: list[int], length: int, clock: paired.Clock
) -> tuple[list[int], int, float]:
    """Return the tokens, how many of the prompt's were cached, and the seconds to the first."""
    engine, begin, first, cached = llm.engine, clock.read(), 0.0, 0
    params = SamplingParams(max_tokens=length, ignore_eos=True, seed=1)
    engine.add(Request(0, tuple(prompt), params))
    ids: list[int] = []
    while not engine.idle:
        for update in engine.step():
            first = first or clock.read() - begin
            ids, cached = ids + update.ids, update.cached_tokens
    return ids, cached, first


def main() -> None:
    parser = paired.parser(__doc__, turns=2)
    parser.add_argument("checkpoint")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--room", type=int, default=2, help="conversations that the device holds")
    parser.add_argument("--questions", type=int, default=4, help="of each conversation")
    parser.add_argument("--first", type=int, default=512, help="tokens of a first question")
    parser.add_argument("--own", type=int, default=32, help="tokens of a later question")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--dtype", default="float32", help="float64: all answers must be equal")
    args = parser.parse_args()
    clock = paired.clock_of(args)
    longest = args.first + args.questions * (args.own + args.answer)
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "max_model_len": longest,
        "max_num_seqs": args.conversations,
    }
    with DiffusionLLM(args.checkpoint, **options) as roomy:
        kv = roomy.engine.kv
        each = kv.pages_for(longest) * kv.page_bytes
        options["kv_cache_memory"] = args.room * each
        with (
            DiffusionLLM(args.checkpoint, **options) as small,
            DiffusionLLM(
                args.checkpoint, swap_space=args.conversations * each / 2**30, **options
            ) as swapping,
        ):
            compare({"device": small, "device, host": swapping, "room for all": roomy}, args, clock)


def compare(
    engines: dict[str, DiffusionLLM], args: argparse.Namespace, clock: paired.Clock
) -> None:
    def contender(llm: DiffusionLLM) -> Callable[[int], Talk]:
        return lambda number: talk(llm, args, clock, 1000 * args.seed + 10 * number)

    found = paired.take_turns({name: contender(llm) for name, llm in engines.items()}, args.repeats)
    print(f"{clock.label}, {args.conversations} conversations of {args.questions} questions,")
    print(f"room on the device for {args.room}")
    print(paired.head("prefixes kept", "hit rate", "first text, ms", "sooner", "equal answers"))
    base = next(iter(found.values()))
    for name, turns in found.items():
        hits = sum(turn.cached for turn in turns) / sum(turn.asked for turn in turns)
        firsts = [median(turn.firsts) for turn in turns]
        ours, theirs = ([row for turn in each for row in turn.rows] for each in (turns, base))
        same = sum(map(list.__eq__, ours, theirs))
        print(
            paired.row(
                name,
                f"{hits:.0%}",
                f"{1e3 * median(firsts):.0f}",
                paired.ratio([median(turn.firsts) for turn in base], firsts),
                f"{same}/{len(ours)}",
            ),
            flush=True,
        )
    for name, llm in engines.items():
        kept = llm.engine.stats().prefixes
        if kept.loaded_bytes:
            print(
                f"{name}: {kept.stored_bytes / 1e6:.0f} MB to the host, "
                f"{kept.loaded_bytes / 1e6:.0f} MB back"
            )


if __name__ == "__main__":
    main()
