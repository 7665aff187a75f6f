"""Plain arithmetic: one to three operations, each written as an equation."""

import random

from examples.train_demo.words import Item, Source, bank

BANK = bank("arithmetic")
LIMIT = 100  # of sums; products reach 144
SIGNS = {"+": ["plus", "and"], "-": ["minus"], "*": ["times", "multiplied by"], "/": ["divided by"]}


def factors(rng: random.Random, top: int = 144) -> tuple[int, int]:
    """Return two factors from 2 to 12, or one of up to 50 if the other is small."""
    while True:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        if rng.random() < 0.2:
            a = rng.randint(2, 50)
        if a * b <= min(top, 144 if a <= 12 else 100):
            return (a, b) if rng.random() < 0.5 else (b, a)


def operands(rng: random.Random, sign: str) -> tuple[int, int, int]:
    """Return two numbers and the result."""
    if sign in "*/":
        a, b = factors(rng)
        if rng.random() < 0.05:
            a = rng.choice([0, 1, 10]) if sign == "*" else rng.choice([1, 10])
        return (a, b, a * b) if sign == "*" else (a * b, b, a)
    total = rng.randint(2, LIMIT if rng.random() < 0.7 else 30)
    a = rng.randint(1, total - 1)
    return (a, total - a, total) if sign == "+" else (total, a, total - a)


def fact(rng: random.Random, sign: str) -> str:
    a, b, c = operands(rng, sign)
    return f"{a}{sign}{b}={c}"


def _part(s: Source) -> Item:
    """Return a half, a double and the like."""
    part = s.rng.choice(BANK["parts"])
    b, sign = part["number"], part["sign"]
    c = s.rng.randint(1, LIMIT // b)
    a, c = (b * c, c) if sign == "/" else (c, b * c)
    asked = s.phrase(part["said"]).format(a)
    ask = s.phrase("What is {}?|what's {}|{}|{}?|How much is {}?|Tell me {}.|{} is?|Calculate {}.")
    text = ask.format(asked)
    text = text[0].upper() + text[1:] if s.chance(0.7) else text
    return s.item("arithmetic", text, f"{a}{sign}{b}={c}")


def one_operation(s: Source) -> Item:
    if s.chance(0.12):
        return _part(s)
    sign = s.rng.choice("+-*/")
    a, b, c = operands(s.rng, sign)
    style = s.rng.random()
    if style < 0.35:
        text = s.phrase(BANK["in_words"][sign]).format(a=a, b=b)
        return s.item("arithmetic", text, f"{a}{sign}{b}={c}")
    if style < 0.65:
        space = s.rng.choice(["", " "])
        shown = sign if s.chance(0.8) or sign in "+-" else {"*": "x", "/": ":"}[sign]
        if shown == "x" and s.chance(0.1):
            shown, space = s.phrase("by|X"), " "
        text = f"{a}{space}{shown}{space}{b}"
    else:
        text = f"{a} {s.rng.choice(SIGNS[sign])} {b}"
    return s.item("arithmetic", _ask(s, text), f"{a}{sign}{b}={c}")


def _ask(s: Source, text: str) -> str:
    return s.phrase(BANK["ask"]).format(text)


def _chain(s: Source) -> Item:
    """Return an item of two or three operations; products come first."""
    rng = s.rng
    kind = rng.randrange(3)
    if kind == 0:  # sums from left to right
        numbers, signs, steps = [rng.randint(1, 60)], list[str](), list[str]()
        for _ in range(rng.choice([2, 2, 3])):
            now = _value(numbers, signs)
            sign = rng.choice("+-") if 1 < now < LIMIT else "-" if now >= LIMIT else "+"
            n = rng.randint(1, max(1, (LIMIT - now) if sign == "+" else now - 1))
            steps.append(f"{now}{sign}{n}={now + n if sign == '+' else now - n}")
            numbers.append(n)
            signs.append(sign)
        result = _value(numbers, signs)
    else:
        a, b = factors(rng, 90)
        sign = rng.choice("+-") if kind == 1 else "+"
        product = a * b
        c = rng.randint(1, LIMIT - product) if sign == "+" else rng.randint(1, product - 1)
        steps = [f"{a}*{b}={product}"]
        if kind == 1:
            numbers, signs = [a, b, c], ["*", sign]
            result = product + c if sign == "+" else product - c
            steps.append(f"{product}{sign}{c}={result}")
        else:
            numbers, signs, result = [c, a, b], ["+", "*"], c + product
            steps.append(f"{c}+{product}={result}")
    spoken = s.chance(0.5)
    parts = [str(numbers[0])]
    space = " " if spoken else rng.choice(["", " "])
    for sign, n in zip(signs, numbers[1:], strict=True):
        parts += [SIGNS[sign][0] if spoken else sign, str(n)]
    return s.item(
        "arithmetic", _ask(s, space.join(parts)), ". ".join(steps) + f". The answer is {result}."
    )


def _value(numbers: list[int], signs: list[str]) -> int:
    return numbers[0] + sum(n if g == "+" else -n for g, n in zip(signs, numbers[1:], strict=True))


def arithmetic(s: Source) -> Item:
    return _chain(s) if s.chance(0.35) else one_operation(s)
