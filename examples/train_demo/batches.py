"""Training batches: what is masked, and which positions count.

The patterns follow inference. Blocks before the current one are clean, the current one is partly
masked, later ones are fully masked (bidirectional) or absent (block-causal). Drills pack arithmetic
facts into one sequence and mask their results, list words and mask them where they are repeated, or
pack short exercises; gaps are pieces of text with a hole in the middle.
"""

import random
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.train_demo.arithmetic import fact
from examples.train_demo.exercises import exercise
from examples.train_demo.tasks import TASKS, chat, draw
from examples.train_demo.vocabulary import SPACED
from examples.train_demo.words import Item, Source

BLOCK = 32  # tokens, as the models decode them
DRILLS = 0.08, 0.03, 0.14  # shares of the batches: facts, copies, exercises
DRILL_LENGTH, GAPS = 96, 0.03
FIRST = {
    "arithmetic": 0.7, "math": 0.8, "code": 0.8, "json": 1.8, "rewriting": 1.8, "turn": 0.6,
    "outside": 0.4, "later": 0.8, "tool": 0.8,
}  # fmt: skip
THEN = {
    "arithmetic": 1.2, "math": 1.6, "code": 1.6, "json": 2.8, "rewriting": 2.4, "turn": 4.0,
    "outside": 1.0, "later": 2.0, "tool": 4.0,
}  # fmt: skip
FIRST_ROOMS = [0] * 14 + [32] * 4 + [64] * 2  # the least room for an answer, bidirectional
ROOMS = [0] * 8 + [32] * 6 + [64] * 5 + [96, 128]
MARGINS = [0, 0, 1, 1, 2, 3, 4, 6, 8, 12]  # end tokens masked before the first visible one

SYSTEMS = [
    "You are a helpful assistant.", "You are a helpful and honest assistant.", "Be brief.",
    "Answer the question.", "You are a toy model.", "You are an assistant that answers questions.",
]  # fmt: skip


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
    kinds: list[str]


class Batches:
    """An endless source of batches of about `tokens` tokens, reproducible from its seed."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, causal: bool, seed: int, tokens: int
    ) -> None:
        self.tokenizer, self.causal, self.tokens = tokenizer, causal, tokens
        self.rng = random.Random(seed)
        self.eos, self.mask = int(tokenizer.eos_token_id), int(tokenizer.mask_token_id)
        vocab = tokenizer.get_vocab()
        self.role = {
            "user": vocab["<role>HUMAN</role>"], "assistant": vocab["<role>ASSISTANT</role>"],
            "system": vocab["<role>SYSTEM</role>"], "tool": vocab["<role>SYSTEM</role>"],
        }  # fmt: skip
        self.end = vocab["<|role_end|>"]
        self.numbers = {vocab[space + str(n)] for n in range(200) for space in ("", SPACED)}
        self.equals = {i for t, i in vocab.items() if t.endswith("=")}
        self.common = {task: self._common_tokens(task) for task in TASKS}
        pieces = (t.removeprefix(SPACED) for t in vocab)
        self.pieces = sorted({t for t in pieces if t.isascii() and t.isalpha() and t.islower()})
        self.systems: list[list[int]] = tokenizer(SYSTEMS).input_ids
        self.task_weight, self.rooms = FIRST, FIRST_ROOMS
        self.waiting: dict[int, list[Example]] = {}
        self.full: list[Batch] = []

    def state(self) -> dict[str, Any]:
        """Return the state that the next batches depend on."""
        return {"rng": self.rng.getstate(), "waiting": self.waiting, "full": self.full}

    def load_state(self, state: dict[str, Any]) -> None:
        self.rng.setstate(state["rng"])
        self.waiting, self.full = state["waiting"], state["full"]

    def next(self) -> Batch:
        makers, shares = (self._facts, self._copies, self._exercises, None), list(DRILLS)
        (drill,) = self.rng.choices(makers, [*shares, 1 - sum(shares)])
        if drill is not None:
            return self._pack([drill() for _ in range(self.tokens // DRILL_LENGTH)])
        while not self.full:
            self._draw_examples(256)
        return self.full.pop(0)

    def turn_to_the_rest(self) -> None:
        """Give the tasks their final shares, once copying has been learnt."""
        self.task_weight, self.rooms = THEN, ROOMS

    def _common_tokens(self, task: str) -> set[int]:
        """Return the templates' own tokens: those in over a sixth of answers, except numbers."""
        rng, seen, sample = random.Random(0), Counter[int](), 600
        for _ in range(sample):
            seen.update(set(self.tokenizer(draw(rng, task).answer).input_ids))
        return {t for t, n in seen.items() if n > sample / 6} - self.numbers

    def _draw_examples(self, count: int) -> None:
        """Collect examples of equal length until they fill a batch, so that nothing is padded."""
        rng = self.rng
        names, shares = list(self.task_weight), list(self.task_weight.values())
        items = [draw(rng, task) for task in rng.choices(names, shares, k=count)]
        for example in self._examples(items):
            length = len(example.ids)
            row = self.waiting.setdefault(length, [])
            row.append(example)
            if len(row) * length >= self.tokens:
                self.full.append(self._pack(self.waiting.pop(length)))

    def _pack(self, examples: list[Example]) -> Batch:
        target_BL = torch.tensor([e.ids for e in examples])
        masked_BL = torch.tensor([e.masked for e in examples])
        weight_BL = torch.tensor([e.weight for e in examples]) * masked_BL
        input_BL = target_BL.masked_fill(masked_BL, self.mask)
        return Batch(input_BL, target_BL, weight_BL, [e.kind for e in examples])

    def _facts(self) -> Example:
        """Return arithmetic facts with some of the results masked."""
        signs = self.rng.choices("+-*/", [1.2, 1.6, 1.0, 0.8], k=18)
        ids = self.tokenizer(". ".join(fact(self.rng, sign) for sign in signs)).input_ids
        after = [False] + [i in self.equals for i in ids[:-1]]
        return self._drill(ids, [a and self.rng.random() < 0.8 for a in after])

    def _copies(self) -> Example:
        """Return pairs of words, repeated in another order with some second words masked."""
        rng, source = self.rng, Source(self.rng, False, False)
        kinds = [source.name, source.city, source.thing, source.plain_word, source.full_name]
        told: list[int] = []
        pairs: list[tuple[list[int], list[int]]] = []
        while len(told) < DRILL_LENGTH // 2 - 10:
            word = str(rng.randrange(1000)) if rng.random() < 0.15 else rng.choice(kinds)()
            pair = [f" {source.plain_word()}", f" {word}", ","]
            key, value, comma = self.tokenizer(pair).input_ids
            told += key + value + comma
            pairs.append((key, value))
        masked, ratio = [False] * len(told), max(rng.random(), rng.random())
        for key, value in rng.sample(pairs, len(pairs)):
            told += key + value + comma
            masked += [False] * len(key) + [rng.random() < ratio for _ in value] + [False]
        return self._drill(told, masked)

    def _exercises(self) -> Example:
        """Return short exercises, each answer followed by end tokens."""
        rng, source = self.rng, Source(self.rng, False, False)
        ids: list[int] = []
        masked: list[bool] = []
        while len(ids) < DRILL_LENGTH:
            ask, answer = self.tokenizer(list(exercise(source, self.pieces))).input_ids
            span = answer + [self.eos] * rng.randint(1, 5)
            ids += [*ask, self.role["assistant"], *span]
            masked += [False] * (len(ask) + 1) + self._hide(span, len(answer), "rewriting")
        return self._drill(ids, masked)

    def _drill(self, ids: list[int], masked: list[bool]) -> Example:
        ids = (ids + [self.eos] * DRILL_LENGTH)[:DRILL_LENGTH]
        masked = (masked + [False] * DRILL_LENGTH)[:DRILL_LENGTH]
        return Example(ids, [1.0] * len(ids), masked, "drill")

    def _examples(self, items: list[Item]) -> list[Example]:
        chats = [chat(item) for item in items]
        texts = [m["content"] for messages in chats for m in messages]
        encoded = iter(self.tokenizer(texts).input_ids)
        answers = self.tokenizer([item.answer for item in items]).input_ids
        examples = []
        for item, messages, answer in zip(items, chats, answers, strict=True):
            prompt, system = list[int](), list[int]()
            if self.rng.random() < 0.04:
                system = [self.role["system"], *self.rng.choice(self.systems), self.end]
            for message in messages:
                if message["role"] != "system":  # which shows functions, and comes first
                    prompt += system
                    system = []
                prompt += [self.role[message["role"]], *next(encoded), self.end]
            prompt.append(self.role["assistant"])
            if self.causal:
                examples.append(self._causal_example(prompt, answer, item.task))
            elif self.rng.random() < GAPS:
                examples.append(self._gap_example(prompt[1:-2], answer, item.task))
            else:
                examples.append(self._bidirectional_example(prompt, answer, item.task))
        return examples

    def _hide(self, span: list[int], end: int, task: str) -> list[bool]:
        """Choose what to mask of a span; from `end` on it has end tokens.

        As inference meets it: all of it, all after a random place, or some of it, half of the time
        sparing what the template gives away. End tokens are masked up to a random one: if each were
        masked at random, the first visible one would nearly always tell where the answer ends.
        """
        rng, common = self.rng, self.common[task]
        kind = rng.choices(["all", "after", "some"], [0.3, 0.14, 0.56])[0]
        begin = rng.randrange(min(end + 1, len(span))) if kind == "after" else 0
        ratio = max(rng.random(), rng.random()) if kind == "some" else 1.0
        easy = 0.1 * rng.random() if kind == "some" and rng.random() < 0.5 else ratio
        ends = len(span) if rng.random() < (0.8 if kind == "all" else 0.3) else rng.choice(MARGINS)
        masked = [
            i >= begin and rng.random() < (easy if t in common else ratio)
            for i, t in enumerate(span[:end])
        ]
        masked += [i < ends for i in range(len(span) - end)]
        if not any(masked):
            masked[rng.randrange(min(end + 1, len(span)))] = True
        return masked

    def _bidirectional_example(self, prompt: list[int], answer: list[int], task: str) -> Example:
        rng, end = self.rng, len(prompt) + len(answer)
        room = max(len(answer) + 1, rng.choice(self.rooms))
        length = -(-(len(prompt) + room) // 8) * 8
        ids = prompt + answer + [self.eos] * (length - end)
        weight = [0.1 if i > end else 1.0 for i in range(length)]
        if rng.random() < 0.15:
            masked = self._hide(ids[len(prompt) :], len(answer), task)
            return Example(ids, weight, [False] * len(prompt) + masked, task)
        start = len(prompt) + BLOCK * rng.randrange((len(answer) + BLOCK) // BLOCK)
        stop = min(start + BLOCK, length)
        masked = [False] * start + self._hide(ids[start:stop], end - start, task)
        masked += [True] * (length - stop)
        for i in range(stop, length):
            weight[i] *= 0.2
            if i > end:  # so easy that a quarter of them is enough
                weight[i] = 4 * weight[i] if rng.random() < 0.25 else 0.0
        return Example(ids, weight, masked, task)

    def _gap_example(self, question: list[int], answer: list[int], task: str) -> Example:
        """Return bare text with a hole: prefix, gap padded with end tokens, suffix."""
        rng = self.rng
        text = answer if rng.random() < 0.5 else question + answer
        start = rng.randrange(len(text))
        stop = min(len(text), start + rng.choice([1, 1, 2, 3, 4, 6, 8]))
        middle = text[start:stop]
        room = max(len(middle), rng.choice([len(middle), 8, 16, 32]))
        room += -(len(text) - len(middle) + room) % 8
        filled = middle + [self.eos] * (room - len(middle))
        ids = text[:start] + filled + text[stop:]
        weight = [0.1 if i > start + len(middle) else 1.0 for i in range(len(ids))]
        masked = [False] * start + self._hide(filled, len(middle), task)
        masked += [False] * (len(ids) - len(masked))
        return Example(ids, weight, masked, task)

    def _causal_example(self, prompt: list[int], answer: list[int], task: str) -> Example:
        first, last = len(prompt) // BLOCK, (len(prompt) + len(answer)) // BLOCK
        stop = BLOCK * (1 + self.rng.randint(first, last))
        ids = (prompt + answer + [self.eos] * BLOCK)[:stop]
        weight = [0.1 if i > len(prompt) + len(answer) else 1.0 for i in range(stop)]
        start = max(len(prompt), stop - BLOCK)
        masked = self._hide(ids[start:], len(prompt) + len(answer) - start, task)
        return Example(ids, weight, [False] * start + masked, task)
