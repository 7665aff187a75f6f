"""Compare this engine with LLaDA's own sampler on a demo model: at equal accuracy, on CPU.

    git clone https://github.com/ML-GSAI/LLaDA
    python -m benchmarks.compare_sampler --llada LLaDA

That repository holds the sampler and not the model, so its `generate` runs this project's model:
same weights, same kernels, same threads. What is compared is the algorithm and what surrounds it.
The sampler takes a fixed number of steps for an answer's whole length, runs the whole canvas in
each and stops at no end token. First the same algorithm (fixed steps, no cache, no early stop) must
give the same tokens here. Then the sampler is given ever fewer steps, as long as it answers as many
questions right as the engine with a threshold does. The engine is timed against the fewest steps,
and against the usual one token a step, taking turns. The sampler takes
prompts one by one; the engine does so too, and then takes them all at once. With few questions,
equal accuracy says little: the easy ones are answered right in very few steps.
"""

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.components.batch import Batch, Window
from diffray.components.kv_pool import KVPool
from examples.train_demo.tasks import held_out_items
from examples.train_demo.words import Item


class Output(NamedTuple):
    """What the sampler reads of a model's answer."""

    logits: Tensor


class AsTheirs:
    """This project's model as the sampler calls it: a whole canvas in, all logits out."""

    def __init__(self, llm: DiffusionLLM) -> None:
        self.model, pool = llm.engine.model, llm.engine.kv
        self.device = pool.keys_LSGD.device
        spec = self.model.spec
        if spec.block_causal:
            raise ValueError("LLaDA's sampler is for models whose attention goes both ways")
        self._kv = KVPool(
            num_layers=spec.num_layers,
            num_pages=2,
            page_size=spec.max_positions,
            num_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=pool.keys_LSGD.dtype,
            device=self.device,
        )
        self._pages_P = torch.tensor(self._kv.allocate(1))

    @torch.inference_mode()
    def __call__(self, ids_BN: Tensor, attention_mask: Tensor | None = None) -> Output:
        if len(ids_BN) != 1 or attention_mask is not None:
            raise ValueError("one prompt at a time, without padding")
        length = ids_BN.shape[1]
        window = Window(0, length, length, 0, self._pages_P)
        batch = Batch.pack([window], self.device, self._kv.page_size)
        hidden_NH = self.model.forward(self.model.embed(ids_BN[0]), batch, self._kv)
        return Output(self.model.head(hidden_NH).unsqueeze(0))


class Sampler:
    """LLaDA's `generate`, from a checkout of its repository."""

    def __init__(self, checkout: Path, llm: DiffusionLLM, max_tokens: int, block: int) -> None:
        source = checkout / "generate.py"
        if not source.is_file():
            raise ValueError(f"{checkout} has no generate.py: not LLaDA's checkout")
        found = importlib.util.spec_from_file_location("llada_generate", source)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        self._generate: Callable[..., Tensor] = module.generate
        self._model, self._max_tokens, self._block = AsTheirs(llm), max_tokens, block
        self._mask_id = llm.engine.limits.mask_token_id

    def run(self, prompts: list[list[int]], steps: int) -> list[list[int]]:
        """Return each prompt's tokens, all of them."""
        return [
            self._generate(
                self._model,
                torch.tensor([prompt]),
                steps=steps,
                gen_length=self._max_tokens,
                block_length=self._block,
                mask_id=self._mask_id,
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]


class Ours:
    """The engine, one prompt after the other or all at once."""

    def __init__(self, llm: DiffusionLLM, params: SamplingParams) -> None:
        self.llm, self.params = llm, params
        self.forwards = 0  # of all sequences, in the last run

    def run(self, prompts: list[list[int]], at_once: bool = False) -> list[list[int]]:
        runs = [prompts] if at_once else [[prompt] for prompt in prompts]
        found = [o for r in runs for o in self.llm.generate(list(r), self.params, use_tqdm=False)]
        self.forwards = sum(output.forwards for output in found)
        return [output.outputs[0].token_ids for output in found]


def until_end(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    """Return the tokens before the first end token: what an answer is, and what is counted."""
    return ids[: next((place for place, token in enumerate(ids) if token in ends), len(ids))]


class Exam(NamedTuple):
    """Questions, as the model's chat, and how answers are judged."""

    llm: DiffusionLLM
    items: list[Item]
    prompts: list[list[int]]

    def answers(self, rows: list[list[int]]) -> list[list[int]]:
        return [until_end(row, self.llm.engine.eos_token_ids) for row in rows]

    def right(self, rows: list[list[int]]) -> int:
        """Return how many are answered exactly."""
        assert self.llm.tokenizer is not None
        texts = [self.llm.tokenizer.decode(ids) for ids in self.answers(rows)]
        return sum(
            text.strip() == item.answer for text, item in zip(texts, self.items, strict=True)
        )

    def tokens(self, rows: list[list[int]]) -> int:
        return sum(map(len, self.answers(rows)))


def params(decoder: dict[str, Any], cache: str, args: argparse.Namespace) -> SamplingParams:
    diffusion = {
        "block_length": args.block_length,
        "iteration": {"kind": "blockwise"},
        "decoder": decoder,
        "cache": {"kind": cache},
    }
    fixed = decoder["kind"] == "fixed"
    return SamplingParams(max_tokens=args.max_tokens, ignore_eos=fixed, diffusion=diffusion)


def check_same(exam: Exam, sampler: Sampler, args: argparse.Namespace) -> None:
    """Run the sampler's own algorithm in the engine and print how many answers are equal."""
    for steps in (args.max_tokens, args.max_tokens // 4):
        decoder = {"kind": "fixed", "steps": steps}
        mine = Ours(exam.llm, params(decoder, "none", args)).run(exam.prompts)
        theirs = sampler.run(exam.prompts, steps)
        same = sum(a == b for a, b in zip(mine, theirs, strict=True))
        print(
            f"same algorithm, {steps} steps: {same} of {len(mine)} answers have equal tokens, "
            f"all {args.max_tokens} of each compared",
            flush=True,
        )


def fewest_steps(exam: Exam, sampler: Sampler, right: int, args: argparse.Namespace) -> int:
    """Return the fewest steps with which the sampler answers as many questions right."""
    blocks = args.max_tokens // args.block_length
    found = int(args.max_tokens)
    per_block = args.block_length
    while per_block >= 1:
        theirs = exam.right(sampler.run(exam.prompts, per_block * blocks))
        print(f"LLaDA's sampler, {per_block * blocks} steps: {theirs} right", flush=True)
        if theirs < right:
            break
        found = per_block * blocks
        per_block //= 2
    return found


def compare(exam: Exam, sampler: Sampler, ours: Ours, steps: int, args: argparse.Namespace) -> None:
    """Print the table; the sampler also with its usual one token a step."""
    most, clock = args.max_tokens, paired.clock_of(args)
    acts: dict[str, Callable[[int], list[list[int]]]] = {
        f"LLaDA's sampler, {steps} steps": lambda _: sampler.run(exam.prompts, steps),
        f"LLaDA's sampler, {most} steps": lambda _: sampler.run(exam.prompts, most),
        "diffray, one by one": lambda _: ours.run(exam.prompts),
        "diffray, all at once": lambda _: ours.run(exam.prompts, at_once=True),
    }
    contenders = {name: clock.timed(act) for name, act in acts.items()}
    turns = paired.take_turns(contenders, args.repeats)
    fewest, usual = list(turns)[:2]
    forwards = {fewest: steps * len(exam.items), usual: most * len(exam.items)}
    print(
        paired.head(
            *("system", "right", "tokens/s", "tokens per forward", "seconds"),
            *(f"faster than {count} steps" for count in (steps, most)),
        )
    )
    for name, all_ in turns.items():
        rows: Any = all_[-1].answers
        tokens, seconds = exam.tokens(rows), median(turn.seconds for turn in all_)
        # What a turn takes, not what it writes: the sampler writes past the end of an answer.
        speeds = {of: [1 / turn.seconds for turn in turns[of]] for of in (name, fewest, usual)}
        print(
            paired.row(
                name,
                f"{exam.right(rows)}/{len(exam.items)}",
                f"{tokens / seconds:.1f}",
                f"{tokens / forwards.get(name, ours.forwards):.2f}",
                f"{seconds:.2f}",
                *(paired.ratio(speeds[name], speeds[base]) for base in (fewest, usual)),
            ),
            flush=True,
        )


def main() -> None:
    parser = paired.parser(__doc__, turns=5, seed=1234)
    parser.add_argument("--llada", type=Path, required=True, help="a checkout of LLaDA")
    parser.add_argument("--model", default="demo", help="one that knows the demo's questions")
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--cache", default="dual", help="of the engine: dual, prefix, none, ...")
    args = parser.parse_args()
    if args.max_tokens % args.block_length or args.block_length % 4:
        parser.error("--max-tokens must be a multiple of --block-length, and that one of 4")
    clock = paired.clock_of(args)
    items = held_out_items(args.questions, args.seed)
    with DiffusionLLM(args.model, dtype="float32", max_num_seqs=16) as llm:
        assert llm.tokenizer is not None
        chats = [[{"role": "user", "content": item.question}] for item in items]
        exam = Exam(llm, items, [llm.tokenizer.encode_chat(chat) for chat in chats])
        sampler = Sampler(args.llada, llm, args.max_tokens, args.block_length)
        print(f"{clock.said}, {args.questions} questions, {args.max_tokens} new tokens")
        check_same(exam, sampler, args)
        decoder = {"kind": "threshold", "threshold": args.threshold}
        ours = Ours(llm, params(decoder, args.cache, args))
        right = exam.right(ours.run(exam.prompts))
        print(f"diffray, threshold {args.threshold}, cache {args.cache}: {right} right")
        compare(exam, sampler, ours, fewest_steps(exam, sampler, right, args), args)


if __name__ == "__main__":
    main()
