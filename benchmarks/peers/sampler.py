"""Compares the engine with LLaDA's own sampler on a demo model, at equal accuracy.

LLaDA's repository holds the sampler and not the model, so its `generate` runs this project's: same
weights, kernels and threads, but another algorithm. It takes a fixed number of steps for an answer,
runs the whole canvas in each and stops at no end token. First the same algorithm (fixed steps, no
cache, no early stop) must give the same tokens here. Then the sampler gets fewer and fewer steps,
as long as it answers as many questions right as the engine with a threshold. With few questions
equal accuracy says little: the easy ones are answered right in very few steps.
"""

import argparse
import importlib.util
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import paired
from benchmarks.peers.table import System
from benchmarks.peers.table import compare as compare_systems
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.datasets import Row, as_ids
from diffray.components.batch import Batch, Window
from diffray.components.kv_pool import KVPool
from examples.train_demo.tasks import held_out_items

MODEL, BLOCK_LENGTH, THRESHOLD = "demo", 32, 0.9


class Output(NamedTuple):
    """The part of a model's output that the sampler reads."""

    logits: Tensor


class WholeCanvas:
    """This project's model as the sampler calls it: a whole canvas in, all logits out."""

    def __init__(self, llm: DiffusionLLM) -> None:
        self.model, pool = llm.engine.model, llm.engine.kv
        spec, self.device = self.model.spec, pool.device
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
        assert len(ids_BN) == 1 and attention_mask is None
        length = ids_BN.shape[1]
        window = Window(0, length, length, 0, self._pages_P)
        batch = Batch.pack([window], self.device, self._kv.page_size)
        hidden_NH = self.model.forward(self.model.embed(ids_BN[0]), batch, self._kv)
        return Output(self.model.head(hidden_NH).unsqueeze(0))


class Exam:
    """Questions, how each system answers them, and how many answers are right."""

    def __init__(self, llm: DiffusionLLM, code: Path, args: argparse.Namespace) -> None:
        self.llm, self.length = llm, args.gen_length or 96
        self.items = held_out_items(args.questions, args.seed)
        self.prompts = as_ids(llm, [Row("demo", item.question) for item in self.items], raw=False)
        spec = importlib.util.spec_from_file_location("llada", code / "generate.py")
        assert spec is not None and spec.loader is not None
        self._llada: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._llada)
        self._model = WholeCanvas(llm)

    def sampler(self, steps: int) -> paired.Answers:
        """Answer with LLaDA's sampler: all tokens of each answer."""
        sizes = {"steps": steps, "gen_length": self.length, "block_length": BLOCK_LENGTH}
        mask_id = self.llm.engine.limits.mask_token_id
        ids = [
            self._llada.generate(self._model, torch.tensor([prompt]), mask_id=mask_id, **sizes)
            for prompt in self.prompts
        ]
        rows = [each[0, -self.length :].tolist() for each in ids]
        return paired.Answers(rows, [steps] * len(rows))

    def engine(self, decoder: dict[str, Any], cache: str, at_once: bool) -> paired.Answers:
        diffusion = {"block_length": BLOCK_LENGTH, "canvas": "fixed", "decoder": decoder}
        diffusion |= {"iteration": {"kind": "blockwise"}, "cache": {"kind": cache}}
        fixed = decoder["kind"] == "fixed"
        params = SamplingParams(max_tokens=self.length, ignore_eos=fixed, diffusion=diffusion)
        every = [params] * len(self.prompts)
        return paired.generate(self.llm, self.prompts, every, at_once=at_once)

    def threshold(self, *, at_once: bool) -> paired.Answers:
        return self.engine({"kind": "threshold", "threshold": THRESHOLD}, "dual", at_once)

    def equal(self, steps: int) -> int:
        """Return how many answers the sampler's own algorithm has in common with it here."""
        mine = self.engine({"kind": "fixed", "steps": steps}, "none", at_once=False).rows
        return sum(a == b for a, b in zip(mine, self.sampler(steps).rows, strict=True))

    def until_end(self, rows: Any) -> list[list[int]]:
        """Return the tokens of each answer before its first end token."""
        ends = self.llm.engine.eos_token_ids
        return [list(takewhile(lambda token: token not in ends, row)) for row in rows]

    def right(self, rows: Any) -> int:
        """Return how many are answered exactly."""
        assert self.llm.tokenizer is not None
        texts = map(self.llm.tokenizer.decode, self.until_end(rows))
        return sum(
            text.strip() == item.answer for text, item in zip(texts, self.items, strict=True)
        )

    def fewest_steps(self) -> int:
        """Return the fewest steps with which the sampler answers as many right as the engine."""
        wanted = self.right(self.threshold(at_once=True).rows)
        found = steps = self.length
        blocks = steps // BLOCK_LENGTH
        while steps and self.right(self.sampler(steps).rows) >= wanted:
            found, steps = steps, steps // 2 // blocks * blocks
        return found


def compare(codes: dict[str, Path], args: argparse.Namespace, clock: paired.Clock) -> None:
    with DiffusionLLM(MODEL, dtype="float32", max_num_seqs=16) as llm:
        exam = Exam(llm, codes["sampler"], args)
        for steps in (exam.length, exam.length // 4):
            print(f"same algorithm, {steps} steps: {exam.equal(steps)} answers have equal tokens")
        fewest = exam.fewest_steps()

        def system(name: str, act: Callable[[], paired.Answers]) -> System:
            """Count tokens up to the end: the sampler writes past it."""
            take = clock.timed(lambda _: act())
            return System(
                name, lambda n: (turn := take(n))._replace(rows=exam.until_end(turn.rows))
            )

        systems = [
            system("diffray, one by one", lambda: exam.threshold(at_once=False)),
            system("diffray, all at once", lambda: exam.threshold(at_once=True)),
            system(f"LLaDA's sampler, {fewest} steps", lambda: exam.sampler(fewest)),
            system(f"LLaDA's sampler, {exam.length} steps", lambda: exam.sampler(exam.length)),
        ]
        work, count = f"{MODEL}, {args.questions} questions", len(exam.items)
        compare_systems(work, systems, args.repeats, lambda rows: f"{exam.right(rows)}/{count}")
