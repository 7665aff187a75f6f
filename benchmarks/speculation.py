"""Measures what copies save: requests with and without speculation or branches.

    python -m benchmarks.speculation demo demo-llada2
    python -m benchmarks.speculation --threads 1 --cpu-time --block-lengths 4 32 -- /tmp/llada-100m
    python -m benchmarks.speculation --cpu-time --batches 1 2 4 8 --only static -- /tmp/sdar-20m

A demo model answers its examples, or with `--requests` held-out questions, as chats and to their
end; another checkpoint continues random ids. The table compares forwards, times and tokens.
Speculation does not change tokens; the branches of `lopa` do.
"""

from collections.abc import Callable
from itertools import chain, cycle, islice, product
from typing import Any

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.datasets import random_ids
from diffray.components.checkpoints.demos import DEMOS, examples
from examples.train_demo.tasks import chat, held_out_items

TOKENS = 64
Diffusion = dict[str, Any]


def policies(drafts: int, branches: int, length: int) -> dict[str, tuple[Diffusion, Diffusion]]:
    """Return pairs of policies for a block length: one without copies, and one with them."""
    verify = {"speculation": {"kind": "verify", "drafts": drafts}}
    decoders: dict[str, Diffusion] = {
        "fixed, one position a step": {"kind": "fixed", "steps": TOKENS},
        "fixed, two": {"kind": "fixed", "steps": TOKENS // 2},
        "static, one position a step": _static(length),
        "static, two": _static(-(-length // 2)),
        "threshold 0.9": {"kind": "threshold", "threshold": 0.9},
    }
    found = {name: ({"decoder": d}, {"decoder": d} | verify) for name, d in decoders.items()}
    for threshold in (0.9, 0.7):
        plain = {"kind": "threshold", "threshold": threshold}
        lopa = {"kind": "lopa", "threshold": threshold, "branches": branches}
        name = f"threshold {threshold}, lopa"
        found[name] = ({"decoder": plain}, {"decoder": lopa})
    return found


def _static(steps: int) -> Diffusion:
    return {"kind": "threshold", "threshold": 1, "steps_per_block": steps}


def main() -> None:
    parser = paired.parser(__doc__, turns=3)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="requests at once")
    parser.add_argument("--requests", type=int, help="requests in a turn; default: one batch")
    parser.add_argument("--block-lengths", type=int, nargs="+", default=[32])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--branches", type=int, default=4)
    parser.add_argument("--only", default="", help="decoders whose names contain this")
    parser.add_argument("--draft-overhead", type=int)
    args = parser.parse_args()
    clock = paired.clock_of(args)
    print(clock.label)
    names = "checkpoint", "batch", "block", "decoder", "forwards", "with copies", "fewer"
    print(paired.head(*names, "speedup", "equal"))
    for checkpoint, batch in product(args.checkpoints, args.batches):
        with DiffusionLLM(
            checkpoint, dtype="float32", max_num_seqs=batch, draft_overhead=args.draft_overhead
        ) as llm:
            number = args.requests or batch
            prompts: Any = random_ids(llm, number, 32, args.seed)
            if checkpoint in DEMOS:
                assert llm.tokenizer is not None
                texts = islice(cycle(examples(checkpoint)), number)
                chats: Any = [[{"role": "user", "content": text}] for text in texts]
                if args.requests:
                    chats = map(chat, held_out_items(number, args.seed))
                prompts = list(map(llm.tokenizer.encode_chat, chats))
            groups = [prompts[first : first + batch] for first in range(0, number, batch)]
            asked = SamplingParams(
                max_tokens=TOKENS,
                temperature=args.temperature,
                seed=args.seed,
                ignore_eos=checkpoint not in DEMOS,
            )
            for length in args.block_lengths:
                for name, pair in policies(args.drafts, args.branches, length).items():
                    if args.only not in name:
                        continue
                    own = [
                        SamplingParams(
                            **asked.model_dump(exclude_unset=True),
                            diffusion=policy | {"block_length": length},
                        )
                        for policy in pair
                    ]
                    found = compare(llm, groups, own, args.repeats, clock)
                    print(paired.row(checkpoint, batch, length, name, *found), flush=True)


def compare(
    llm: DiffusionLLM,
    groups: list[Any],
    pair: list[SamplingParams],
    turns: int,
    clock: paired.Clock,
) -> tuple[object, ...]:
    """Return the last cells of a row: forwards, their ratio, the speedup, equal answers."""

    def contender(params: SamplingParams) -> Callable[[int], paired.Turn]:
        def act(_: int) -> paired.Answers:
            found = [paired.generate(llm, group, [params] * len(group)) for group in groups]
            rows, forwards = (list(chain.from_iterable(each)) for each in zip(*found, strict=True))
            return paired.Answers(rows, forwards)

        return clock.timed(act)

    contenders = dict(zip(("plain", "copies"), map(contender, pair), strict=True))
    plain, copies = paired.take_turns(contenders, turns).values()
    before, after = (sum(turns[-1].forwards) for turns in (plain, copies))
    fewer = f"{before / after:.2f}"
    return before, after, fewer, paired.speedup(copies, plain), paired.equal_answers(copies, plain)


if __name__ == "__main__":
    main()
