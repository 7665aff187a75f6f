"""Problems of one step, in many short phrasings."""

import re

from examples.train_demo.arithmetic import LIMIT, factors
from examples.train_demo.sentences import solved
from examples.train_demo.words import Item, Source, bank

BANK = bank("short_problems")
NUMBERS: list[str] = BANK["numbers"]


def short(s: Source) -> Item:
    """Return a problem of one step, without a person."""
    rng = s.rng
    sign = rng.choice("+-*/")
    template = s.phrase(BANK[sign])
    thing, one = s.thing(), s.plain_word(0.6)
    a, b = factors(rng, LIMIT)
    if min(a, b) < 2:
        a, b = 6, 7
    p = rng.randint(1, LIMIT - 1)
    q = rng.randint(1, LIMIT - p)
    said = NUMBERS[b] if b < len(NUMBERS) and s.chance(0.2) else b
    question = template.format(x=one, y=thing, a=a, b=said, c=a * b, p=p, q=q, s=p + q)
    question = question[0].upper() + question[1:]
    step, result = {
        "*": (f"{b}*{a}={a * b}", a * b),
        "/": (f"{a * b}/{b}={a}", a),
        "+": (f"{p}+{q}={p + q}", p + q),
        "-": (f"{p + q}-{q}={p}", p),
    }[sign]
    unit = _unit(template, thing, one)
    return solved(s, question, [f"{step} {unit}."], result)


def _unit(template: str, thing: str, one: str) -> str:
    """Return what the last sentence of a short story counts."""
    asked = re.split(r"(?<=[.:?,]) ", template)[-1]
    if "{x}s are needed" in asked or "{x}s can" in asked:
        return one + "s"
    if "groups" in asked:
        return "groups"
    if "pay" in asked or "cost" in asked or "How much" in asked:
        return "dollars"
    if "heavy" in asked:
        return "kilos"
    for word in BANK["units"]:
        if word in asked:
            return str(word)
    return thing
