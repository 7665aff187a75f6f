"""A second turn that changes the first: another number, another order, another name."""

import json
import re

from examples.train_demo.arithmetic import LIMIT, OPERATORS, SIGNS, arithmetic, equation, operands
from examples.train_demo.json_extraction import compact, edited, json_extraction
from examples.train_demo.python_functions import python_function
from examples.train_demo.rewriting import edited_list, rewriting
from examples.train_demo.word_problems import word_problem
from examples.train_demo.words import Item, Source, bank

BANK = bank("second_turns")


def _turn(s: Source, first: Item, ask: str, answer: str) -> Item:
    if s.chance(0.3):
        bare = ask.rstrip(".?!")
        lower = bare[0].lower() + bare[1:]
        ask = s.phrase(BANK["politely"]).format(b=bare, l=lower)
    second = s.item("turn", ask, answer)
    return second._replace(
        key=f"{first.key} / {second.key}", before=((first.question, first.answer),)
    )


def _json(s: Source) -> Item:
    """Ask for fewer keys, another order, or a changed value."""
    while True:
        first = json_extraction(s)
        values = json.loads(first.answer)
        if len(values) > 1:
            break
    edit = s.rng.choice(["only", "without", "reverse", "set", "rename"])
    key = s.rng.choice(list(values))
    new: str | int = ""
    if edit == "rename":
        new = s.invented(1)
    elif edit == "set":
        new = s.rng.randint(2, 99) if isinstance(values[key], int) else s.name()
    ask = s.phrase(BANK["json"][edit]).format(k=key, n=new)
    return _turn(s, first, ask, compact(edited(values, edit, key, new)))


def _list(s: Source) -> Item:
    """Ask for the list of an answer the other way round, or for a part of it."""
    while True:
        first = rewriting(s)
        words = first.answer.split(", ")
        if len(words) > 1 and first.question.count(words[-1]) and "_" not in first.question:
            break
    edit = s.rng.choice(["reverse", "first", "last", "add", "without"])
    word = ""
    if edit == "without":
        word = s.rng.choice(words)
    elif edit == "add":
        word = str(s.rng.randint(1, 99)) if words[0].isdigit() else s.plain_word()
    ask = s.phrase(BANK["list"][edit]).format(w=word)
    return _turn(s, first, ask, ", ".join(edited_list(words, edit, word)))


def _code(s: Source) -> Item:
    """Ask for another function name or argument name."""
    first = python_function(s)
    match = re.match(r"def (\w+)\((\w+)", first.answer)
    assert match is not None
    new = s.invented() if s.chance(0.7) else s.rng.choice("f g run compute helper solve go".split())
    if s.chance(0.6):
        ask = s.phrase(BANK["code"]["function"]).format(n=new)
        return _turn(s, first, ask, re.sub(rf"\b{match[1]}\(", f"{new}(", first.answer))
    ask = s.phrase(BANK["code"]["argument"]).format(n=new, o=match[2])
    return _turn(s, first, ask, re.sub(rf"\b{match[2]}\b", new, first.answer))


def _sum(s: Source) -> Item:
    """Continue with the result: plus, minus, times."""
    rng = s.rng
    while True:
        sign = rng.choice("+-*/")
        a, b = operands(rng, sign)
        c = OPERATORS[sign](a, b)
        if 1 < c < LIMIT:
            break
    asked = rng.choice([f"{a} {SIGNS[sign][0]} {b}", f"{a}{sign}{b}", f"{a} {sign} {b}"])
    question = s.phrase("What is {}?|{}|How much is {}?|Calculate {}.|{} = ?|What's {}?")
    first = s.item("arithmetic", question.format(asked), equation(a, sign, b))
    then = rng.choice(["+", "-"] + (["*"] if 2 * c <= LIMIT else []))
    top = {"+": LIMIT - c, "-": c - 1, "*": LIMIT // c}[then]
    low, most = (2, 12) if then == "*" else (1, 60)
    d = rng.randint(low, max(low, min(top, most)))
    return _turn(s, first, s.phrase(BANK["sum"][then]).format(d=d), equation(c, then, d))


def _number(s: Source) -> Item:
    """Ask for the result without the steps."""
    first = s.rng.choice([arithmetic, word_problem])(s)
    ask = s.phrase(BANK["number"])
    return _turn(s, first, ask, re.findall(r"\d+", first.answer)[-1])


def second_turn(s: Source) -> Item:
    return s.rng.choice([_json, _json, _list, _list, _code, _sum, _number])(s)
