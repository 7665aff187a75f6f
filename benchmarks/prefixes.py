"""What it is worth that requests share the K/V of what they begin with, on a block-causal model.

    python -m benchmarks.random_checkpoint /tmp/llada2-100m --layout llada2_moe
    python -m benchmarks.prefixes --threads 1 --cpu-time /tmp/llada2-100m

Two engines of the same weights, one that shares and one that does not, take turns at the same work.
Four kinds of work: prompts that have their beginning in common and come together; one prompt of
which there are to be many answers; a conversation, each of whose prompts has the one before and its
answer in it; and prompts that have nothing in common, which gain nothing and should lose nothing.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.datasets import random_ids

Answers = list[list[int]]


def alike(llm: DiffusionLLM, args: argparse.Namespace, seed: int) -> Answers:
    prompts = random_ids(llm, args.requests, args.own, seed, args.common)
    return answers(llm, prompts, args)


def unlike(llm: DiffusionLLM, args: argparse.Namespace, seed: int) -> Answers:
    prompts = random_ids(llm, args.requests, args.common + args.own, seed)
    return answers(llm, prompts, args)


def choices(llm: DiffusionLLM, args: argparse.Namespace, seed: int) -> Answers:
    prompts = random_ids(llm, 1, args.common + args.own, seed)
    return answers(llm, prompts, args, n=args.requests, temperature=1.0)


def conversation(llm: DiffusionLLM, args: argparse.Namespace, seed: int) -> Answers:
    said, *questions = random_ids(llm, args.requests, args.own, seed, args.common)
    found: Answers = []
    for question in [[], *(question[args.common :] for question in questions)]:
        said += question
        found += answers(llm, [said], args)
        said += found[-1]
    return found


def answers(
    llm: DiffusionLLM, prompts: list[list[int]], args: argparse.Namespace, **sampling: float
) -> Answers:
    params = SamplingParams(max_tokens=args.answer, ignore_eos=True, seed=1, **sampling)
    found = llm.generate(list(prompts), params, use_tqdm=False)
    return [choice.token_ids for row in found for choice in row.outputs]


Work = Callable[[DiffusionLLM, argparse.Namespace, int], Answers]
WORK: dict[str, Work] = {
    "a beginning in common": alike,
    "answers to one prompt": choices,
    "turns of a conversation": conversation,
    "nothing in common": unlike,
}


def measure(
    sharing: DiffusionLLM, apart: DiffusionLLM, args: argparse.Namespace, clock: paired.Clock
) -> None:
    """Print a row of the table for each kind of work; every turn has prompts of its own."""
    draws = random.Random(args.seed)
    for name, work in WORK.items():
        seeds = [draws.getrandbits(30) for _ in range(args.repeats + 1)]

        def contender(llm: DiffusionLLM, work: Work = work, seeds: list[int] = seeds) -> Any:
            return clock.timed(lambda number: work(llm, args, seeds[number]))

        contenders = {"sharing": contender(sharing), "apart": contender(apart)}
        turns = paired.take_turns(contenders, args.repeats)
        ours, theirs = turns["sharing"], turns["apart"]
        whole = [
            paired.Turn(0.0, [answer for turn in all_ for answer in turn.answers])
            for all_ in (ours, theirs)
        ]
        ratio = paired.ratio(paired.rates(ours), paired.rates(theirs))
        cells = (paired.rate(ours), paired.rate(theirs), ratio, paired.equal_answers(*whole))
        print(paired.row(name, *cells), flush=True)


def main() -> None:
    parser = paired.parser(__doc__, turns=3)
    parser.add_argument("checkpoint")
    parser.add_argument("--requests", type=int, default=8, help="prompts, answers or turns")
    parser.add_argument("--common", type=int, default=512, help="tokens that they begin with")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt's own")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--dtype", default="float32", help="float64: all answers must be equal")
    args = parser.parse_args()
    clock = paired.clock_of(args)
    longest = args.common + args.requests * (args.own + args.answer)
    options: dict[str, Any] = {"dtype": args.dtype, "max_num_seqs": args.requests}
    options["max_model_len"] = longest
    with (
        DiffusionLLM(args.checkpoint, **options) as sharing,
        DiffusionLLM(args.checkpoint, enable_prefix_caching=False, **options) as apart,
    ):
        print(f"{clock.said}, {args.requests} requests, prompts of")
        print(f"{args.common} + {args.own} tokens, answers of {args.answer}")
        print(paired.head("work", "sharing, tok/s", "apart, tok/s", "ratio", "equal answers"))
        measure(sharing, apart, args, clock)


if __name__ == "__main__":
    main()
