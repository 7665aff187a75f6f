"""Training batches: what is masked, and which positions count.

The patterns follow inference. Blocks before the current one are clean, the current one is partly
masked, later ones fully masked (bidirectional) or absent (block-causal). Drills pack arithmetic
facts into one sequence and mask their results.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.train_demo.sampler import BLOCK
from examples.train_demo.tasks import GENERATORS, draw
from examples.train_demo.word_problems import LIMIT, factors

DRILL_LENGTH = 96
FIRST_TASKS = {"math": 1.0, "code": 0.6, "json": 1.4}
THEN_TASKS = {"math": 2.2, "code": 0.5, "json": 0.5}
FIRST_OPERATIONS = dict.fromkeys("+-*/", 1.0)
THEN_OPERATIONS = {"+": 1.5, "-": 2.0, "*": 0.4, "/": 0.6}


class Example(NamedTuple):
    """Ids, the targets' weights (0 where visible), and the masked positions."""

    ids: list[int]
    weight: list[float]
    masked: list[bool]
    kind: str


class Batch(NamedTuple):
    input_BL: Tensor
    target_BL: Tensor
    weight_BL: Tensor
    items: int
    kind: str


def fact(rng: random.Random, operation: str) -> str:
    if operation in "*/":
        a, b = factors(rng)
        return f"{a}*{b}={a * b}" if operation == "*" else f"{a * b}/{b}={a}"
    total = rng.randint(2, LIMIT)
    a = rng.randint(1, total - 1)
    return f"{a}+{total - a}={total}" if operation == "+" else f"{total}-{a}={total - a}"


class Batches:
    """An endless source of batches of about `tokens` tokens, reproducible from its seed."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        causal: bool,
        seed: int,
        tokens: int,
        drills: float,
    ) -> None:
        self.tokenizer, self.causal, self.tokens, self.drills = tokenizer, causal, tokens, drills
        self.rng = random.Random(seed)
        self.eos, self.mask = int(tokenizer.eos_token_id), int(tokenizer.mask_token_id)
        vocab = tokenizer.get_vocab()
        self.numbers = {vocab[str(n)] for n in range(200)}
        self.common = self._common_tokens()
        self.equals = {i for t, i in vocab.items() if t.endswith("=")}
        self.operation_weight, self.task_weight = FIRST_OPERATIONS, FIRST_TASKS

    def __iter__(self) -> Iterator[Batch]:
        examples = self._example_batches()
        while True:
            drill = self.rng.random() < self.drills
            yield self._drill_batch() if drill else next(examples)

    def turn_to_sums(self) -> None:
        """Copying is learnt by now; sums and differences take the longest."""
        self.operation_weight, self.task_weight = THEN_OPERATIONS, THEN_TASKS

    def _common_tokens(self) -> set[int]:
        """Tokens that at least one answer in eighteen holds, numbers aside: the templates' own."""
        rng, seen, sample = random.Random(0), Counter[int](), 3000
        for task in GENERATORS:
            for _ in range(sample):
                seen.update(set(self.tokenizer(draw(rng, task, held_out=False).answer).input_ids))
        return {t for t, n in seen.items() if n > sample / 6} - self.numbers | {self.eos}

    def _example_batches(self) -> Iterator[Batch]:
        """Collect examples of equal length until they fill a batch, so that nothing is padded."""
        waiting: dict[int, list[Example]] = defaultdict(list)
        while True:
            for example in self._examples(256):
                row = waiting[len(example.ids)]
                row.append(example)
                if len(row) * len(example.ids) >= self.tokens:
                    yield self._pack(waiting.pop(len(example.ids)))

    def _pack(self, examples: list[Example]) -> Batch:
        target_BL = torch.tensor([e.ids for e in examples])
        masked_BL = torch.tensor([e.masked for e in examples])
        weight_BL = torch.tensor([e.weight for e in examples]) * masked_BL
        input_BL = target_BL.masked_fill(masked_BL, self.mask)
        return Batch(input_BL, target_BL, weight_BL, len(examples), examples[0].kind)

    def _drill_batch(self) -> Batch:
        examples = []
        operations = random.Random(self.rng.random()).choices(
            list(self.operation_weight), list(self.operation_weight.values()), k=10**4
        )
        for _ in range(self.tokens // DRILL_LENGTH):
            text = ". ".join(fact(self.rng, operations.pop()) for _ in range(18))
            ids = self.tokenizer(text).input_ids[:DRILL_LENGTH]
            ids += [self.eos] * (DRILL_LENGTH - len(ids))
            after = [False] + [i in self.equals for i in ids[:-1]]
            masked = [a and self.rng.random() < 0.8 for a in after]
            examples.append(Example(ids, [1.0] * len(ids), masked, "drill"))
        return self._pack(examples)

    def _examples(self, count: int) -> Iterator[Example]:
        names, shares = list(self.task_weight), list(self.task_weight.values())
        assert set(names) == set(GENERATORS)
        items = [
            draw(self.rng, t, held_out=False) for t in self.rng.choices(names, shares, k=count)
        ]
        chats = [[{"role": "user", "content": item.question}] for item in items]
        prompts = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=False
        )
        answers = self.tokenizer([item.answer for item in items]).input_ids
        for prompt, answer, item in zip(prompts, answers, items, strict=True):
            make = self._causal_example if self.causal else self._bidirectional_example
            yield make(prompt, answer, item.task)

    def _hide(self, ids: list[int], start: int, stop: int) -> list[bool]:
        """Mask a part of [start, stop): at random, or what a template does not give away."""
        rng, masked = self.rng, [False] * len(ids)
        ratio = 1.0 if rng.random() < 0.1 else rng.random()
        easy = ratio if rng.random() < 0.5 else 0.1 * rng.random()
        for i in range(start, stop):
            masked[i] = rng.random() < (easy if ids[i] in self.common else ratio)
        if not any(masked):
            masked[rng.randrange(start, stop)] = True
        return masked

    def _bidirectional_example(self, prompt: list[int], answer: list[int], task: str) -> Example:
        rng = self.rng
        least = -(-(len(answer) + 1) // BLOCK) * BLOCK
        room = max(least, rng.choice([32, 32, 32, 32, 32, 64, 64, 64, 96, 128]))
        length = -(-(len(prompt) + room) // 16) * 16
        ids = prompt + answer + [self.eos] * (length - len(prompt) - len(answer))
        weight = [0.1 if i > len(prompt) + len(answer) else 1.0 for i in range(length)]
        if rng.random() < 0.25:
            return Example(ids, weight, self._hide(ids, len(prompt), length), task)
        start = len(prompt) + BLOCK * rng.randrange((len(answer) + BLOCK) // BLOCK)
        stop = min(start + BLOCK, length)
        masked = self._hide(ids, start, stop)
        for i in range(stop, length):
            masked[i], weight[i] = True, weight[i] * 0.2
        return Example(ids, weight, masked, task)

    def _causal_example(self, prompt: list[int], answer: list[int], task: str) -> Example:
        first, last = len(prompt) // BLOCK, (len(prompt) + len(answer)) // BLOCK
        stop = BLOCK * (1 + self.rng.randint(first, last))
        ids = (prompt + answer + [self.eos] * BLOCK)[:stop]
        weight = [0.1 if i > len(prompt) + len(answer) else 1.0 for i in range(stop)]
        return Example(ids, weight, self._hide(ids, max(len(prompt), stop - BLOCK), stop), task)
