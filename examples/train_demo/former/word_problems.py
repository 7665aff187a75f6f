"""Word problems in two or three steps, each step an equation with numbers up to 80."""

import random
from collections.abc import Callable

from examples.train_demo.former.words import FIRST, SHE, THINGS
from examples.train_demo.words import Item

LIMIT = 80


def factors(rng: random.Random, top: int = LIMIT) -> tuple[int, int]:
    """Two factors from 2 to 12 whose product is at most `top`."""
    while True:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        if a * b <= top:
            return a, b


def _run(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    while True:
        (a, b), (c, d) = factors(rng), factors(rng)
        if a * b + c * d <= LIMIT:
            break
    verb = rng.choice(["run", "walk", "ride", "swim", "drive", "row"])
    unit = rng.choice(["kilometers", "miles"])
    then = rng.choice(["After that", "Then", "Later"])
    question = (
        f"{name} can {verb} {a} {unit} per hour for {b} hours. {then}, {she} {verb}s {c} {unit} "
        f"per hour. How many {unit} can {she} {verb} in {b + d} hours?"
    )
    return question, (
        f"In the first {b} hours: {a}*{b}={a * b} {unit}. Hours left: {b + d}-{b}={d}. "
        f"In that time: {c}*{d}={c * d} {unit}. In total: {a * b}+{c * d}={a * b + c * d}. "
        f"The answer is {a * b + c * d}."
    )


def _shop(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    while True:
        (a, b), (c, d) = factors(rng), factors(rng)
        if a * b + c * d <= LIMIT:
            break
    x, y = rng.sample(THINGS, 2)
    verb = rng.choice(["buys", "orders", "gets"])
    end = rng.choice([f"How much does {she} pay?", f"How many dollars does {she} spend in total?"])
    question = f"{name} {verb} {a} {x} for {b} dollars each and {c} {y} for {d} dollars each. {end}"
    return question, (
        f"The {x} cost {a}*{b}={a * b} dollars. The {y} cost {c}*{d}={c * d} dollars. "
        f"Together: {a * b}+{c * d}={a * b + c * d}. The answer is {a * b + c * d}."
    )


def _change(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    a, b = factors(rng, LIMIT - 5)
    money = rng.randint(a * b + 1, LIMIT)
    x = rng.choice(THINGS)
    if rng.random() < 0.5:
        question = f"{name} has {money} dollars and buys {a} {x} for {b} dollars each. "
    else:
        question = f"{name} buys {a} {x} at {b} dollars each and pays with {money} dollars. "
    question += rng.choice([f"How many dollars does {she} have left?", "How much money is left?"])
    return question, (
        f"The {x} cost {a}*{b}={a * b} dollars. Left: {money}-{a * b}={money - a * b}. "
        f"The answer is {money - a * b}."
    )


def _boxes(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    a, b = factors(rng)
    x, box = rng.choice(THINGS), rng.choice(["boxes", "bags", "baskets", "rows"])
    start = rng.choice(
        [f"{name} has {a} {box} with {b} {x} in each.", f"There are {a} {box} of {b} {x}."]
    )
    if rng.random() < 0.5:
        c = rng.randint(1, a * b - 1)
        verb = rng.choice(["gives away", "sells", "loses"])
        question = f"{start} {name} {verb} {c} {x}. How many {x} are left?"
        step = f"Left: {a * b}-{c}={(result := a * b - c)}."
    else:
        c = rng.randint(1, max(1, LIMIT - a * b))
        verb = rng.choice(["adds", "finds", "brings"])
        question = f"{start} {name} {verb} {c} more {x}. How many {x} are there now?"
        step = f"Now: {a * b}+{c}={(result := a * b + c)}."
    return question, f"At first: {a}*{b}={a * b} {x}. {step} The answer is {result}."


def _give(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    a = rng.randint(2, LIMIT - 20)
    b = rng.randint(2, min(60, LIMIT - a))
    c = rng.randint(1, a + b - 1)
    x, other = rng.choice(THINGS), rng.choice([n for n in FIRST if n != name])
    verb, gets = rng.choice(["loses", "sells", "gives away"]), rng.choice(["gives", "sends"])
    her = "her" if she == "she" else "him"
    question = (
        f"{name} has {a} {x}. {other} {gets} {her} {b} more. Then {she} {verb} {c}. "
        f"How many {x} does {she} have now?"
    )
    return question, (
        f"With the {x} from {other}: {a}+{b}={a + b}. After that: {a + b}-{c}={a + b - c}. "
        f"The answer is {a + b - c}."
    )


def _share(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    k, q = factors(rng)
    a = rng.randint(1, k * q - 1)
    b = k * q - a
    x, who = rng.choice(THINGS), rng.choice(["friends", "children", "neighbors"])
    verb = rng.choice(["finds", "buys", "makes"])
    question = (
        f"{name} has {a} {x} and {verb} {b} more. {she.capitalize()} shares all of them equally "
        f"among {k} {who}. How many {x} does each get?"
    )
    return question, f"All {x}: {a}+{b}={k * q}. Each gets {k * q}/{k}={q}. The answer is {q}."


def _times(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    a, k = rng.choice([(a, k) for k in range(2, 13) for a in range(2, 13) if a * k + a <= LIMIT])
    x, other = rng.choice(THINGS), rng.choice([n for n in FIRST if n != name])
    end = rng.choice(["in total", "together"])
    question = (
        f"{name} has {a} {x}. {other} has {k} times as many. How many {x} do they have {end}?"
    )
    return question, (
        f"{other} has {k}*{a}={k * a} {x}. Together: {a}+{k * a}={a + k * a}. "
        f"The answer is {a + k * a}."
    )


def _read(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    a, b = factors(rng, LIMIT - 5)
    n = rng.randint(a * b + 1, LIMIT)
    days = rng.choice(["days", "weeks", "evenings"])
    verb, x = rng.choice([("reads", "pages"), ("solves", "puzzles"), ("writes", "letters")])
    question = (
        f"{name} wants to finish {n} {x}. {she.capitalize()} {verb} {a} {x} a {days[:-1]} for {b} "
        f"{days}. How many {x} remain?"
    )
    return question, (
        f"Done so far: {a}*{b}={a * b} {x}. Remaining: {n}-{a * b}={n - a * b}. "
        f"The answer is {n - a * b}."
    )


FAMILIES: tuple[Callable[[random.Random, str, str], tuple[str, str]], ...] = (
    _run, _run, _shop, _change, _boxes, _give, _share, _times, _read,
)  # fmt: skip


def word_problem(rng: random.Random) -> Item:
    name = rng.choice(FIRST)
    she = "she" if name in SHE else "he"
    return Item("math", *rng.choice(FAMILIES)(rng, name, she))
