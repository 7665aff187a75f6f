"""What it is worth that requests share the K/V of what they begin with, on a block-causal model.

    python -m benchmarks.random_checkpoint /tmp/llada2-100m --layout llada2_moe
    python -m benchmarks.prefixes --threads 1 --cpu-time /tmp/llada2-100m

Two engines of the same weights, one that shares and one that does not, take turns at the same work.
Each turn has prompts of its own, so none of an earlier turn is found. Four kinds of work: prompts
that have their beginning in common and come together; one prompt of which there are to be many
answers; a conversation, each of whose prompts has the one before and its answer in it; and prompts
that have nothing in common, which gain nothing and should lose nothing. A ratio is the median over
turns of one turn's two times.
"""

import argparse
import random
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.clock import Clock, add_flags, chosen
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.workload import random_ids

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


WORK: dict[str, Callable[[DiffusionLLM, argparse.Namespace, int], Answers]] = {
    "a beginning in common": alike,
    "answers to one prompt": choices,
    "turns of a conversation": conversation,
    "nothing in common": unlike,
}


def measure(
    engines: tuple[DiffusionLLM, DiffusionLLM], args: argparse.Namespace, clock: Clock
) -> None:
    """Print a row of the table for each kind of work."""
    draws = random.Random(args.seed)
    for name, work in WORK.items():
        times: list[tuple[float, float]] = []
        equal = written = 0
        for turn in range(args.repeats + 1):
            seed, took, found = draws.getrandbits(30), [0.0, 0.0], [Answers(), Answers()]
            for which in (0, 1) if turn % 2 else (1, 0):
                begin = clock.read()
                found[which] = work(engines[which], args, seed)
                took[which] = clock.read() - begin
            if turn:  # the first warms up
                times.append((took[0], took[1]))
                equal += sum(a == b for a, b in zip(*found, strict=True))
                written += len(found[0])
        ratios = sorted(apart / sharing for sharing, apart in times)
        tokens = args.requests * args.answer
        rates = [f"{tokens / median(seconds):.1f}" for seconds in zip(*times, strict=True)]
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {' | '.join([name, *rates, spread, f'{equal}/{written}'])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint")
    parser.add_argument("--requests", type=int, default=8, help="prompts, answers or turns")
    parser.add_argument("--common", type=int, default=512, help="tokens that they begin with")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt's own")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32", help="float64: all answers must be equal")
    parser.add_argument("--seed", type=int, default=1)
    add_flags(parser)
    args = parser.parse_args()
    clock = chosen(args)
    options: dict[str, Any] = {"dtype": args.dtype, "max_num_seqs": args.requests}
    longest = args.common + args.requests * (args.own + args.answer)
    with (
        DiffusionLLM(args.checkpoint, max_model_len=longest, **options) as sharing,
        DiffusionLLM(
            args.checkpoint, max_model_len=longest, enable_prefix_caching=False, **options
        ) as apart,
    ):
        print(f"{clock.said}, {args.requests} requests, prompts of")
        print(f"{args.common} + {args.own} tokens, answers of {args.answer}")
        print("| work | sharing, tok/s | apart, tok/s | ratio | equal answers |")
        print("|---|---|---|---|---|")
        measure((sharing, apart), args, clock)


if __name__ == "__main__":
    main()
