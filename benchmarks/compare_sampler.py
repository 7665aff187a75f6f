"""Compare this engine with LLaDA's own sampler on a demo model: at equal accuracy, on CPU.

    git clone https://github.com/ML-GSAI/LLaDA
    python -m benchmarks.compare_sampler --llada LLaDA

That repository holds the sampler and not the model, so its `generate` runs this project's model:
same weights, kernels and threads, but another algorithm. The sampler takes a fixed number of steps
for an answer, runs the whole canvas in each and stops at no end token. First the same algorithm
(fixed steps, no cache, no early stop) must give the same tokens here. Then the sampler gets fewer
and fewer steps, as long as it answers as many questions right as the engine with a threshold. The
engine is timed against the fewest steps and against the usual one token per step. The sampler runs
prompts one by one; the engine runs them one by one, and all at once. With few questions, equal
accuracy says little: the easy ones are answered right in very few steps.
"""

import argparse
import importlib.util
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.datasets import Row, as_ids
from diffray.components.batch import Batch, Window
from diffray.components.kv_pool import KVPool
from examples.train_demo.tasks import held_out_items
from examples.train_demo.words import Item


class Output(NamedTuple):
    """The part of a model's output that the sampler reads."""

    logits: Tensor


class WholeCanvas:
    """This project's model as the sampler calls it: a whole canvas in, all logits out."""

    def __init__(self, llm: DiffusionLLM) -> None:
        self.model, pool = llm.engine.model, llm.engine.kv
        self.device = pool.device
        spec = self.model.spec
        if spec.block_causal:
            raise ValueError("LLaDA's sampler is for models whose attention is bidirectional")
        self._kv = KVPool(
            shapes=spec.kv_shapes,
            num_pages=2,
            page_size=spec.max_positions,
            dtype=pool.dtype,
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


class Exam:
    """Questions, how each system answers them, and how many answers are right."""

    def __init__(self, llm: DiffusionLLM, items: list[Item], args: argparse.Namespace) -> None:
        self.llm, self.items, self.args = llm, items, args
        self.prompts = as_ids(llm, [Row("demo", item.question) for item in items], raw=False)
        source = args.llada / "generate.py"
        if not source.is_file():
            raise ValueError(f"{args.llada} has no generate.py: not LLaDA's checkout")
        spec = importlib.util.spec_from_file_location("llada_generate", source)
        assert spec is not None and spec.loader is not None
        self._sampler: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._sampler)
        self._model = WholeCanvas(llm)

    def sampler(self, steps: int) -> paired.Answers:
        """Answer with LLaDA's sampler: all tokens of each answer."""
        rows = [
            self._sampler.generate(
                self._model,
                torch.tensor([prompt]),
                steps=steps,
                gen_length=self.args.max_tokens,
                block_length=self.args.block_length,
                mask_id=self.llm.engine.limits.mask_token_id,
            )[0, len(prompt) :].tolist()
            for prompt in self.prompts
        ]
        return paired.Answers(rows, [steps] * len(rows))

    def engine(
        self, decoder: dict[str, Any], cache: str, *, at_once: bool = False
    ) -> paired.Answers:
        diffusion = {
            "block_length": self.args.block_length,
            "iteration": {"kind": "blockwise"},
            "decoder": decoder,
            "cache": {"kind": cache},
            "canvas": "fixed",
        }
        fixed = decoder["kind"] == "fixed"
        params = SamplingParams(
            max_tokens=self.args.max_tokens, ignore_eos=fixed, diffusion=diffusion
        )
        every = [params] * len(self.prompts)
        return paired.generate(self.llm, self.prompts, every, at_once=at_once)

    def threshold(self, *, at_once: bool = False) -> paired.Answers:
        decoder = {"kind": "threshold", "threshold": self.args.threshold}
        return self.engine(decoder, self.args.cache, at_once=at_once)

    def until_end(self, rows: Any) -> list[list[int]]:
        """Return the tokens of each answer before its first end token."""
        ends = self.llm.engine.eos_token_ids
        return [
            row[: next((place for place, id in enumerate(row) if id in ends), len(row))]
            for row in rows
        ]

    def right(self, rows: Any) -> int:
        """Return how many are answered exactly."""
        assert self.llm.tokenizer is not None
        texts = [self.llm.tokenizer.decode(ids) for ids in self.until_end(rows)]
        pairs = zip(texts, self.items, strict=True)
        return sum(text.strip() == item.answer for text, item in pairs)


def check_same(exam: Exam, most: int) -> None:
    """Run the sampler's own algorithm in the engine and print how many answers are equal."""
    for steps in (most, most // 4):
        mine = exam.engine({"kind": "fixed", "steps": steps}, "none").rows
        same = sum(a == b for a, b in zip(mine, exam.sampler(steps).rows, strict=True))
        print(
            f"same algorithm, {steps} steps: {same} of {len(mine)} answers have equal tokens, "
            f"all {most} of each compared",
            flush=True,
        )


def fewest_steps(exam: Exam, right: int) -> int:
    """Return the fewest steps with which the sampler answers as many questions right."""
    found = steps = int(exam.args.max_tokens)
    blocks = steps // exam.args.block_length
    while steps:
        theirs = exam.right(exam.sampler(steps).rows)
        print(f"LLaDA's sampler, {steps} steps: {theirs} right", flush=True)
        if theirs < right:
            break
        found, steps = steps, steps // 2 // blocks * blocks
    return found


def compare(exam: Exam, fewest: int, clock: paired.Clock) -> None:
    """Print the table; the sampler runs also with its usual one token per step."""
    most = exam.args.max_tokens
    bases = [f"LLaDA's sampler, {steps} steps" for steps in (fewest, most)]
    contenders = {
        bases[0]: clock.timed(lambda _: exam.sampler(fewest)),
        bases[1]: clock.timed(lambda _: exam.sampler(most)),
        "diffray, one by one": clock.timed(lambda _: exam.threshold()),
        "diffray, all at once": clock.timed(lambda _: exam.threshold(at_once=True)),
    }
    turns = paired.take_turns(contenders, exam.args.repeats)
    print(
        paired.head(
            *("system", "right", "tokens/s", "tokens per forward", "seconds"),
            *(f"faster than {steps} steps" for steps in (fewest, most)),
        )
    )
    # By a turn's time, not its tokens: the sampler writes past the end of an answer.
    speeds = {name: [1 / turn.seconds for turn in all_] for name, all_ in turns.items()}
    for name, all_ in turns.items():
        rows, seconds = all_[-1].rows, median(turn.seconds for turn in all_)
        tokens = sum(map(len, exam.until_end(rows)))
        print(
            paired.row(
                name,
                f"{exam.right(rows)}/{len(exam.items)}",
                f"{tokens / seconds:.1f}",
                f"{tokens / sum(all_[-1].forwards):.2f}",
                f"{seconds:.2f}",
                *(paired.ratio(speeds[name], speeds[base]) for base in bases),
            ),
            flush=True,
        )


def main() -> None:
    parser = paired.parser(__doc__, turns=5, seed=1234)
    parser.add_argument("--llada", type=Path, required=True, help="a checkout of LLaDA")
    parser.add_argument("--model", default="demo", help="one trained on the demo's questions")
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--cache", default="dual", help="of the engine: dual, prefix, none, ...")
    args = parser.parse_args()
    if args.max_tokens % args.block_length or args.block_length % 4:
        parser.error("--max-tokens must be a multiple of --block-length, which must be one of 4")
    clock = paired.clock_of(args)
    items = held_out_items(args.questions, args.seed)
    with DiffusionLLM(args.model, dtype="float32", max_num_seqs=16) as llm:
        exam = Exam(llm, items, args)
        print(f"{clock.label}, {args.questions} questions, {args.max_tokens} new tokens")
        check_same(exam, args.max_tokens)
        right = exam.right(exam.threshold().rows)
        print(f"diffray, threshold {args.threshold}, cache {args.cache}: {right} right")
        compare(exam, fewest_steps(exam, right), clock)


if __name__ == "__main__":
    main()
