"""What a batch gains: the same requests one by one and together, on one engine.

    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.ragged --threads 1 --cpu-time demo tests/golden/llada /tmp/llada-100m

Nothing about the requests is equal: prompts are of all lengths from short to long, and so are
answers. The demo models get their own questions, others random ids; where ends are ignored, every
token asked for is written. First both ways must give the same tokens, then they take turns; a ratio
is the median over turns of one turn's two times, so that a busy machine slows both. On a CPU a
forward of many tokens is not much cheaper a token than one of few: `--block-length` 4 or 8, and
processors with more of them, show more than the default.
"""

import argparse
import random
from pathlib import Path
from statistics import median

from benchmarks.clock import Clock, add_flags, chosen
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.prompts import read_asks
from diffray.cluster.cli.bench.workload import as_ids, random_ids
from diffray.components.checkpoints.demos import DEMOS

Work = tuple[list[list[int]], list[SamplingParams]]


def ragged_work(llm: DiffusionLLM, checkpoint: str, args: argparse.Namespace) -> Work:
    """Return prompts and answers' lengths of all sizes, the same for the same seed."""
    draws = random.Random(args.seed)
    if checkpoint in DEMOS:
        prompts = as_ids(llm, read_asks("demo", None, args.requests), raw=False)
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


def one_by_one(llm: DiffusionLLM, work: Work) -> list[list[int]]:
    return [
        llm.generate([prompt], wish, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, wish in zip(*work, strict=True)
    ]


def together(llm: DiffusionLLM, work: Work) -> list[list[int]]:
    return [row.outputs[0].token_ids for row in llm.generate(*work, use_tqdm=False)]


def measure(checkpoint: str, args: argparse.Namespace, clock: Clock) -> str:
    """Return one row of the table."""
    ways = one_by_one, together
    with DiffusionLLM(
        checkpoint,
        dtype="float32",
        max_num_seqs=args.batch,
        enable_prefix_caching=False,  # prompts come again, and should find nothing of theirs
    ) as llm:
        work = ragged_work(llm, checkpoint, args)
        alone, batched = (way(llm, work) for way in ways)  # warm
        times: list[list[float]] = [[], []]
        for turn in range(args.repeats):
            for which in (0, 1) if turn % 2 else (1, 0):
                start = clock.read()
                ways[which](llm, work)
                times[which].append(clock.read() - start)
    tokens = sum(map(len, alone))
    equal = sum(a == b for a, b in zip(alone, batched, strict=True))
    ratios = sorted(one / all_ for one, all_ in zip(*times, strict=True))
    rates = [f"{tokens / median(seconds):.1f}" for seconds in times]
    spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    cells = [Path(checkpoint).name, *rates, spread, f"{equal}/{len(alone)}"]
    return f"| {' | '.join(cells)} |"


HEADER = """\
| checkpoint | one by one, tok/s | together, tok/s | ratio | equal answers |
|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoints", nargs="*", default=["demo"])
    parser.add_argument("--batch", type=int, default=8, help="sequences that run together")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-lengths", type=int, nargs=2, default=[16, 96])
    parser.add_argument("--answer-lengths", type=int, nargs=2, default=[16, 128])
    parser.add_argument("--block-length", type=int, help="left out: the model's default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    add_flags(parser)
    args = parser.parse_args()
    clock = chosen(args)
    print(f"{clock.said}, batch {args.batch}, blocks of", end=" ")
    print(f"{args.block_length or 'the default length'}, {args.requests} requests, prompts of")
    print(f"{args.prompt_lengths} tokens, answers of {args.answer_lengths}\n{HEADER}")
    for checkpoint in args.checkpoints:
        print(measure(checkpoint, args, clock), flush=True)


if __name__ == "__main__":
    main()
