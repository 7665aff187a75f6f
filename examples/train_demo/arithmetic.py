"""Plain arithmetic: one to three operations, each written as an equation."""

import operator
import random
from collections.abc import Callable

from examples.train_demo.words import Item, Source, bank

BANK = bank("arithmetic")
LIMIT = 100  # of sums; products reach 144
SIGNS = {"+": ["plus", "and"], "-": ["minus"], "*": ["times", "multiplied by"], "/": ["divided by"]}
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv,
}  # fmt: skip


def equation(a: int, sign: str, b: int) -> str:
    return f"{a}{sign}{b}={OPERATORS[sign](a, b)}"


def factors(rng: random.Random, top: int = 144) -> tuple[int, int]:
    """Return two factors from 2 to 12, or one of up to 50 if the other is small."""
    while True:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        if rng.random() < 0.2:
            a = rng.randint(2, 50)
        if a * b <= min(top, 144 if a <= 12 else 100):
            return (a, b) if rng.random() < 0.5 else (b, a)


def operands(rng: random.Random, sign: str) -> tuple[int, int]:
    if sign in "*/":
        a, b = factors(rng)
        if rng.random() < 0.05:
            a = rng.choice([0, 1, 10]) if sign == "*" else rng.choice([1, 10])
        return (a, b) if sign == "*" else (a * b, b)
    total = rng.randint(2, LIMIT if rng.random() < 0.7 else 30)
    a = rng.randint(1, total - 1)
    return (a, total - a) if sign == "+" else (total, a)


def fact(rng: random.Random, sign: str) -> str:
    a, b = operands(rng, sign)
    return equation(a, sign, b)


def _part(s: Source) -> Item:
    """Return a half, a double and the like."""
    part = s.rng.choice(BANK["parts"])
    b, sign = part["number"], part["sign"]
    c = s.rng.randint(1, LIMIT // b)
    a = b * c if sign == "/" else c
    asked = s.phrase(part["said"]).format(a)
    ask = s.phrase("What is {}?|what's {}|{}|{}?|How much is {}?|Tell me {}.|{} is?|Calculate {}.")
    text = ask.format(asked)
    text = text[0].upper() + text[1:] if s.chance(0.7) else text
    return s.item("arithmetic", text, equation(a, sign, b))


def one_operation(s: Source) -> Item:
    if s.chance(0.12):
        return _part(s)
    sign = s.rng.choice("+-*/")
    a, b = operands(s.rng, sign)
    style = s.rng.random()
    if style < 0.35:
        text = s.phrase(BANK["in_words"][sign]).format(a=a, b=b)
        return s.item("arithmetic", text, equation(a, sign, b))
    if style < 0.65:
        space = s.rng.choice(["", " "])
        shown = sign if s.chance(0.8) or sign in "+-" else {"*": "x", "/": ":"}[sign]
        if shown == "x" and s.chance(0.1):
            shown, space = s.phrase("by|X"), " "
        text = f"{a}{space}{shown}{space}{b}"
    else:
        text = f"{a} {s.rng.choice(SIGNS[sign])} {b}"
    return s.item("arithmetic", s.phrase(BANK["ask"]).format(text), equation(a, sign, b))


def _chain(s: Source) -> Item:
    """Return an item of two or three operations; products come first."""
    rng = s.rng
    kind = rng.choice(["sums", "product first", "product last"])
    steps: list[str] = []
    terms: list[str] = []  # numbers and signs in turn
    if kind == "sums":  # from left to right
        now = rng.randint(1, 60)
        terms.append(str(now))
        for _ in range(rng.choice([2, 2, 3])):
            sign = rng.choice("+-") if 1 < now < LIMIT else "-" if now >= LIMIT else "+"
            n = rng.randint(1, max(1, (LIMIT - now) if sign == "+" else now - 1))
            terms += [sign, str(n)]
            steps.append(equation(now, sign, n))
            now = OPERATORS[sign](now, n)
    else:
        a, b = factors(rng, 90)
        sign = rng.choice("+-") if kind == "product first" else "+"
        c = rng.randint(1, LIMIT - a * b) if sign == "+" else rng.randint(1, a * b - 1)
        left, right = (a * b, c) if kind == "product first" else (c, a * b)
        steps = [equation(a, "*", b), equation(left, sign, right)]
        product = [str(a), "*", str(b)]
        terms = [*product, sign, str(c)] if kind == "product first" else [str(c), "+", *product]
        now = OPERATORS[sign](left, right)
    spoken = s.chance(0.5)
    space = " " if spoken else rng.choice(["", " "])
    said = [SIGNS[term][0] if spoken and term in SIGNS else term for term in terms]
    answer = ". ".join([*steps, f"The answer is {now}."])
    return s.item("arithmetic", s.phrase(BANK["ask"]).format(space.join(said)), answer)


def arithmetic(s: Source) -> Item:
    return _chain(s) if s.chance(0.35) else one_operation(s)
