"""What a batch gains: the same requests one by one and together, on one engine.

    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.ragged --threads 1 --cpu-time demo tests/golden/llada /tmp/llada-100m

Nothing about the requests is equal: prompts are of all lengths from short to long, and so are
answers. The demo models get their own questions, others random ids; where ends are ignored, every
token asked for is written. On a CPU a forward of many tokens is not much cheaper a token than one
of few: `--block-length` 4 or 8, and processors with more of them, show more than the default.
"""

import argparse
import random
from pathlib import Path

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.datasets import as_ids, random_ids, read_rows
from diffray.components.checkpoints.demos import DEMOS

Work = tuple[list[list[int]], list[SamplingParams]]


def ragged_work(llm: DiffusionLLM, checkpoint: str, args: argparse.Namespace) -> Work:
    """Return prompts and answers' lengths of all sizes, the same for the same seed."""
    draws = random.Random(args.seed)
    if checkpoint in DEMOS:
        prompts = as_ids(llm, read_rows("demo", None, args.requests), raw=False)
    else:
        longest = random_ids(llm, args.requests, args.prompt_lengths[1], args.seed)
        prompts = [ids[: draws.randint(*args.prompt_lengths)] for ids in longest]
    diffusion = {"block_length": args.block_length} if args.block_length else {}
    wishes = [
        SamplingParams(
            max_tokens=draws.randint(*args.answer_lengths),
            ignore_eos=checkpoint not in DEMOS,
            diffusion=diffusion,
        )
        for _ in prompts
    ]
    return prompts, wishes


def measure(checkpoint: str, args: argparse.Namespace, clock: paired.Clock) -> str:
    """Return one row of the table."""
    with DiffusionLLM(
        checkpoint,
        dtype="float32",
        max_num_seqs=args.batch,
        enable_prefix_caching=False,  # prompts come again, and should find nothing of theirs
    ) as llm:
        prompts, wishes = ragged_work(llm, checkpoint, args)

        def one_by_one(_: int) -> list[list[int]]:
            pairs = zip(prompts, wishes, strict=True)
            return [ids for p, w in pairs for ids in written(llm, [p], [w])]

        def together(_: int) -> list[list[int]]:
            return written(llm, prompts, wishes)

        contenders = {"alone": clock.timed(one_by_one), "together": clock.timed(together)}
        alone, all_ = paired.take_turns(contenders, args.repeats).values()
    return paired.row(
        Path(checkpoint).name,
        paired.rate(alone),
        paired.rate(all_),
        paired.ratio(paired.rates(all_), paired.rates(alone)),
        paired.equal_answers(alone[-1], all_[-1]),
    )


def written(
    llm: DiffusionLLM, prompts: list[list[int]], wishes: list[SamplingParams]
) -> list[list[int]]:
    found = llm.generate(list(prompts), wishes, use_tqdm=False)
    return [row.outputs[0].token_ids for row in found]


def main() -> None:
    parser = paired.parser(__doc__, turns=5)
    parser.add_argument("checkpoints", nargs="*", default=["demo"])
    parser.add_argument("--batch", type=int, default=8, help="sequences that run together")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-lengths", type=int, nargs=2, default=[16, 96])
    parser.add_argument("--answer-lengths", type=int, nargs=2, default=[16, 128])
    parser.add_argument("--block-length", type=int, help="left out: the model's default")
    args = parser.parse_args()
    clock = paired.clock_of(args)
    print(f"{clock.said}, batch {args.batch}, blocks of", end=" ")
    print(f"{args.block_length or 'the default length'}, {args.requests} requests, prompts of")
    print(f"{args.prompt_lengths} tokens, answers of {args.answer_lengths}")
    columns = ("checkpoint", "one by one, tok/s", "together, tok/s", "ratio", "equal answers")
    print(paired.head(*columns))
    for checkpoint in args.checkpoints:
        print(measure(checkpoint, args, clock), flush=True)


if __name__ == "__main__":
    main()
