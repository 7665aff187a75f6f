"""Measures what batching gains: the same requests one by one and together, on one engine.

    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.ragged --threads 1 --cpu-time demo tests/golden/llada /tmp/llada-100m

Prompts and answers range from short to long. The demo models get their own questions, other models
random ids, with end tokens ignored. On a CPU a forward of many tokens is not much cheaper
per token than one of few: `--block-length` 4 or 8, and more cores, show more than the default.
"""

import argparse
import random
from pathlib import Path

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.datasets import as_ids, random_ids, read_rows
from diffray.components.checkpoints.demos import DEMOS


def ragged_work(
    llm: DiffusionLLM, checkpoint: str, args: argparse.Namespace
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters of all lengths, the same for the same seed."""
    draws = random.Random(args.seed)
    if checkpoint in DEMOS:
        prompts = as_ids(llm, read_rows("demo", None, args.requests), raw=False)
    else:
        longest = random_ids(llm, args.requests, args.prompt_lengths[1], args.seed)
        prompts = [ids[: draws.randint(*args.prompt_lengths)] for ids in longest]
    params = [
        SamplingParams(
            max_tokens=draws.randint(*args.answer_lengths),
            ignore_eos=checkpoint not in DEMOS,
            diffusion={"block_length": args.block_length} if args.block_length else {},
        )
        for _ in prompts
    ]
    return prompts, params


def measure(checkpoint: str, args: argparse.Namespace, clock: paired.Clock) -> str:
    """Return one row of the table."""
    with DiffusionLLM(
        checkpoint,
        dtype="float32",
        max_num_seqs=args.batch,
        enable_prefix_caching=False,  # every turn has the same prompts
    ) as llm:
        work = ragged_work(llm, checkpoint, args)
        contenders = {
            "alone": clock.timed(lambda _: paired.generate(llm, *work, at_once=False)),
            "together": clock.timed(lambda _: paired.generate(llm, *work)),
        }
        alone, together = paired.take_turns(contenders, args.repeats).values()
    return paired.row(
        Path(checkpoint).name,
        paired.rate(alone),
        paired.rate(together),
        paired.speedup(together, alone),
        paired.equal_answers(alone, together),
    )


def main() -> None:
    parser = paired.parser(__doc__, turns=5)
    parser.add_argument("checkpoints", nargs="*", default=["demo"])
    parser.add_argument("--batch", type=int, default=8, help="sequences that run together")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-lengths", type=int, nargs=2, default=[16, 96])
    parser.add_argument("--answer-lengths", type=int, nargs=2, default=[16, 128])
    parser.add_argument("--block-length", type=int, help="default: the model's")
    args = parser.parse_args()
    clock = paired.clock_of(args)
    print(f"{clock.label}, batch {args.batch}, blocks of", end=" ")
    print(f"{args.block_length or 'the default length'}, {args.requests} requests, prompts of")
    print(f"{args.prompt_lengths} tokens, answers of {args.answer_lengths}")
    columns = ("checkpoint", "one by one, tok/s", "together, tok/s", "ratio", "equal answers")
    print(paired.head(*columns))
    for checkpoint in args.checkpoints:
        print(measure(checkpoint, args, clock), flush=True)


if __name__ == "__main__":
    main()
