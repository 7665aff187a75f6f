"""Measures what sharing K/V gains: of common prefixes, or of first steps if bidirectional.

    python -m benchmarks.random_checkpoint /tmp/llada2-100m --layout llada2_moe
    python -m benchmarks.prefixes --threads 1 --cpu-time /tmp/llada2-100m
    python -m benchmarks.prefixes --threads 1 --cpu-time --first-steps approx demo

Two engines with the same weights, one that shares and one that does not, take turns at the same
work. There are four kinds of work: prompts with a common prefix that arrive together; many answers
to one prompt; a conversation, each of whose prompts contains the one before and its answer; and
prompts that have nothing in common, which gain nothing and should lose nothing.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.datasets import random_ids

Rows = list[list[int]]
Work = Callable[[DiffusionLLM, argparse.Namespace, int], Rows]


def alike(llm: DiffusionLLM, args: argparse.Namespace, seed: int) -> Rows:
    return rows(llm, random_ids(llm, args.requests, args.own, seed, args.common), args)


def unlike(llm: DiffusionLLM, args: argparse.Namespace, seed: int) -> Rows:
    return rows(llm, random_ids(llm, args.requests, args.common + args.own, seed), args)


def choices(llm: DiffusionLLM, args: argparse.Namespace, seed: int) -> Rows:
    prompts = random_ids(llm, 1, args.common + args.own, seed)
    return rows(llm, prompts, args, n=args.requests, temperature=1.0)


def conversation(llm: DiffusionLLM, args: argparse.Namespace, seed: int) -> Rows:
    history, *questions = random_ids(llm, args.requests, args.own, seed, args.common)
    found: Rows = []
    for question in [[], *(question[args.common :] for question in questions)]:
        history += question
        found += rows(llm, [history], args)
        history += found[-1]
    return found


def rows(llm: DiffusionLLM, prompts: Rows, args: argparse.Namespace, **sampling: Any) -> Rows:
    params = SamplingParams(max_tokens=args.answer, ignore_eos=True, seed=1, **sampling)
    found = llm.generate(list(prompts), params, use_tqdm=False)
    return [choice.token_ids for row in found for choice in row.outputs]


WORK: dict[str, Work] = {
    "a common prefix": alike,
    "answers to one prompt": choices,
    "turns of a conversation": conversation,
    "nothing in common": unlike,
}


def measure(name: str, sharing: DiffusionLLM, apart: DiffusionLLM, args: argparse.Namespace) -> str:
    """Return a row of the table; every turn has its own prompts."""
    clock, draws = paired.clock_of(args), random.Random(f"{args.seed} {name}")
    seeds = [draws.getrandbits(30) for _ in range(args.repeats + 1)]

    def contender(llm: DiffusionLLM) -> Callable[[int], paired.Turn]:
        return clock.timed(lambda number: paired.Answers(WORK[name](llm, args, seeds[number])))

    contenders = {"sharing": contender(sharing), "apart": contender(apart)}
    turns = list(paired.take_turns(contenders, args.repeats).values())
    whole = ([row for turn in all_ for row in turn.rows] for all_ in turns)
    return paired.row(
        name,
        *map(paired.rate, turns),
        paired.speedup(*turns),
        paired.equal_answers(*([paired.Turn(0.0, all_)] for all_ in whole)),
    )


def main() -> None:
    parser = paired.parser(__doc__, turns=3)
    parser.add_argument("checkpoint")
    parser.add_argument("--requests", type=int, default=8, help="prompts, answers or turns")
    parser.add_argument("--common", type=int, default=512, help="tokens of the common prefix")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt's own")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--dtype", default="float32", help="float64: all answers must be equal")
    parser.add_argument("--only", nargs="+", default=[*WORK], choices=[*WORK], metavar="WORK")
    parser.add_argument(
        "--first-steps", default="step0", help="step0 or approx, for bidirectional attention"
    )
    args = parser.parse_args()
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "max_num_seqs": args.requests,
        "max_model_len": args.common + args.requests * (args.own + args.answer),
    }
    with DiffusionLLM(args.checkpoint, enable_prefix_caching=False, **options) as apart:
        if not apart.limits.spec.block_causal:
            options["first_step_caching"] = args.first_steps
        with DiffusionLLM(args.checkpoint, **options) as sharing:
            print_table(sharing, apart, args)


def print_table(sharing: DiffusionLLM, apart: DiffusionLLM, args: argparse.Namespace) -> None:
    print(f"{paired.clock_of(args).label}, {args.requests} requests, prompts of")
    print(f"{args.common} + {args.own} tokens, answers of {args.answer}")
    print(paired.head("work", "sharing, tok/s", "apart, tok/s", "ratio", "equal answers"))
    for name in args.only:
        print(measure(name, sharing, apart, args), flush=True)


if __name__ == "__main__":
    main()
