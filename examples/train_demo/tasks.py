"""The tasks of the demo models, and which questions are kept for tests.

An item is kept out of training if it has a held-out word, a held-out phrasing, or a held-out
skeleton: the question with names and things blanked. So no test question has a near-duplicate in
training. `python -m examples.train_demo.tasks` prints examples of every task, or with `--rows demo
--count 400` held-out questions as JSON lines, the content of diffray/prompts/demo.jsonl;
demo-harder.jsonl and demo-json.jsonl are made the same way.
"""

import argparse
import functools
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from examples.train_demo.arithmetic import arithmetic
from examples.train_demo.json_extraction import json_extraction
from examples.train_demo.noise import noisy, reworded
from examples.train_demo.outside import outside
from examples.train_demo.python_functions import python_function
from examples.train_demo.rewriting import rewriting
from examples.train_demo.second_turns import second_turn
from examples.train_demo.tool_questions import tool_question
from examples.train_demo.word_problems import word_problem
from examples.train_demo.words import Item, Source, bucket, words_of

GENERATORS: dict[str, Callable[[Source], Item]] = {
    "arithmetic": arithmetic, "math": word_problem, "code": python_function,
    "json": json_extraction,
    "rewriting": rewriting, "turn": second_turn, "outside": outside,
}  # fmt: skip
TASKS = (*GENERATORS, "later", "tool")  # also after other questions, and beside functions
HARDER = ("math", "json", "code", "turn")
WRITTEN = ("questions", "asked", "later", "tools")


def rows_of(name: str) -> list[Any]:
    """Return the rows of a file written by hand: questions with answers, or bare questions."""
    text = Path(__file__).parent.joinpath("written", f"{name}.json").read_text("utf-8")
    rows: list[Any] = json.loads(text)
    return rows


@functools.cache
def written_words() -> dict[int, list[list[str]]]:
    """Return the words of each question written by hand, by the number of words."""
    questions = [row["question"] for name in WRITTEN for row in rows_of(name)]
    by_size: dict[int, list[list[str]]] = {}
    for words in map(words_of, questions + rows_of("unrelated")):
        by_size.setdefault(len(words), []).append(words)
    return by_size


def is_near_written(item: Item) -> bool:
    """Return whether a question written by hand differs only in names and things."""
    key = words_of(item.key)
    return any(
        all(k in (w, "_") for k, w in zip(key, words, strict=True))
        for words in written_words().get(len(key), [])
    )


def is_held_out(item: Item) -> bool:
    """Return whether training never sees an item: a skeleton in sixteen, and near written ones."""
    return bucket(item.key, 16) == 0 or is_near_written(item)


def draw(rng: random.Random, task: str, split: str = "train", noise: bool = True) -> Item:
    """Return the next item of a task.

    Splits: "train"; "entities", in trained phrasings with words that training never has;
    "phrasings", with at least one phrasing that training never has, and unseen words.
    """
    if task == "later":
        last = draw(rng, rng.choice(list(GENERATORS)), split, noise)
        return _after_others(rng, last._replace(task="later"), split, noise)
    make = tool_question if task == "tool" else GENERATORS[task]
    while True:
        source = Source(rng, split != "train", split == "phrasings")
        source.lower = noise and rng.random() < 0.15
        item = make(source)
        if noise and split == "train" and item.role == "user" and source.chance(0.25):
            item = reworded(source, item)
        new = split != "phrasings" or source.used_held_out_phrase
        if new and is_held_out(item) == (split != "train"):
            break
    if task == "tool" and source.chance(0.2):
        item = _after_others(rng, item, split, noise)
    return _typed(source, item) if noise and item.role == "user" else item


def _typed(source: Source, item: Item) -> Item:
    """Return the item with its question as somebody may type it."""
    source.phrasings, task = False, item.task
    answer = set(words_of(item.answer))
    spared = {word for drawn in source.drawn for word in words_of(drawn)}
    spared |= answer if task != "outside" else set()
    ending = task in ("math", "code", "outside", "arithmetic")
    typed = noisy(source, item.question, spared, ending)
    wanted = answer - set(words_of(typed))
    if task == "tool":
        wanted &= set(words_of(item.question))
    if wanted and task in ("json", "rewriting", "turn", "tool"):
        return item  # noise changed a value, or the question lacks part of the answer
    return item._replace(question=typed)


def _after_others(rng: random.Random, item: Item, split: str, noise: bool) -> Item:
    """Return the item after one or two questions that have nothing to do with it."""
    before: list[tuple[str, str]] = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        first = draw(rng, rng.choice(list(GENERATORS)), split, noise)
        before += [*first.before, (first.question, first.answer)]
    return item._replace(before=(*before, *item.before))


def drawn(split: str, count: int, seed: int, tasks: Iterable[str] = GENERATORS) -> list[Item]:
    """Return distinct items of one split, from each task in turn."""
    rng, items, names = random.Random(seed), dict[str, Item](), list(tasks)
    while len(items) < count:
        item = draw(rng, names[len(items) % len(names)], split)
        items.setdefault("\n".join(m["content"] for m in chat(item)), item)
    return list(items.values())


def held_out_items(count: int, seed: int = 1234, split: str = "entities") -> list[Item]:
    """Return distinct held-out questions without earlier turns, from each task in turn."""
    return drawn(split, count, seed, [name for name in GENERATORS if name != "turn"])


def harder_half(count: int, seed: int = 1234) -> list[Item]:
    """Return held-out items of the harder tasks whose answers are not short."""
    items = drawn("entities", 4 * count, seed, HARDER)
    return [i for i in items if len(i.answer.split()) + i.answer.count(",") >= 6][:count]


def chat(item: Item) -> list[dict[str, str]]:
    """Return the item's turns as messages."""
    system = [{"role": "system", "content": item.system}] if item.system else []
    turns = [
        {"role": role, "content": text}
        for pair in item.before
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return [*system, *turns, {"role": item.role, "content": item.question}]


def print_prompts(name: str, count: int) -> None:
    """Print the rows of a task of `diffray eval`."""
    items = {
        "demo": held_out_items,
        "demo-harder": harder_half,
        "demo-json": lambda count: drawn("entities", count, 1234, ["json"]),
    }[name](count)
    for number, item in enumerate(items):
        row: dict[str, Any] = {"id": f"{name}/{number}", "task": item.task}
        row |= {"prompt": item.question, "answer": item.answer}
        if item.before or item.system:
            row["messages"] = chat(item)
        if name == "demo-json":
            row["answer"] = json.loads(item.answer)
            kinds = {
                k: "integer" if isinstance(v, int) else "string" for k, v in row["answer"].items()
            }
            row["schema"] = {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in kinds.items()},
                "required": [*kinds],
                "additionalProperties": False,
            }
        print(json.dumps(row, ensure_ascii=False))


def print_examples() -> None:
    generator = random.Random(0)
    for task_name in TASKS:
        print(task_name)
        for _ in range(12):
            one = draw(generator, task_name)
            print(f"  {' | '.join(m['content'] for m in chat(one))}\n    {one.answer!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", choices=["demo", "demo-harder", "demo-json"])
    parser.add_argument("--count", type=int, default=400)
    given = parser.parse_args()
    print_prompts(given.rows, given.count) if given.rows else print_examples()
