"""Three small tasks with exact answers: word problems, Python functions and JSON extraction.

A question belongs to the held-out split when its hash says so, hence the splits are disjoint.
`python -m examples.train_demo.former.tasks` checks them: it runs every equation and function.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable

from examples.train_demo.former.json_extraction import json_extraction
from examples.train_demo.former.python_functions import python_function
from examples.train_demo.former.word_problems import word_problem
from examples.train_demo.words import Item


def is_held_out(question: str) -> bool:
    """One question in sixteen is never trained on."""
    return hashlib.sha256(question.encode()).digest()[0] % 16 == 0


GENERATORS: dict[str, Callable[[random.Random], Item]] = {
    "math": word_problem, "code": python_function, "json": json_extraction
}  # fmt: skip


def draw(rng: random.Random, task: str, held_out: bool) -> Item:
    """The next item of a task from one split."""
    while True:
        item = GENERATORS[task](rng)
        if is_held_out(item.question) is held_out:
            return item


def held_out_items(count: int, seed: int = 1234) -> list[Item]:
    """Distinct held-out items, the tasks taking turns."""
    rng = random.Random(seed)
    items: dict[str, Item] = {}
    names = list(GENERATORS)
    while len(items) < count:
        item = draw(rng, names[len(items) % len(names)], held_out=True)
        items.setdefault(item.question, item)
    return list(items.values())


def _check(item: Item) -> None:
    if item.task == "math":
        equations = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", item.answer)
        for a, op, b, c in equations:
            assert eval(f"{a}{op}{b}") == int(c), item
        assert item.answer.endswith(f"The answer is {equations[-1][3]}."), item
    elif item.task == "code":
        scope: dict[str, Callable[[object], object]] = {}
        exec(item.answer, scope)
        scope.pop("__builtins__")
        (function,) = scope.values()
        words = "in words" in item.answer or "text" in item.answer
        function("the quick brown fox jumps over lazy dogs" if words else [*range(-99, 100)])
    else:
        for value in json.loads(item.answer).values():
            assert str(value) in item.question, item


if __name__ == "__main__":
    generator = random.Random(0)
    for task_name in GENERATORS:
        drawn = [draw(generator, task_name, held_out=False) for _ in range(20000)]
        for one in drawn:
            _check(one)
        print(task_name, len({one.question for one in drawn}), "distinct of", len(drawn))
        for one in drawn[:6]:
            print(f"  {one.question}\n    {one.answer!r}")
