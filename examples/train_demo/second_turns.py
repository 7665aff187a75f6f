"""A second turn that changes the first: another number, another order, another name."""

import json
import re

from examples.train_demo.arithmetic import LIMIT, operands
from examples.train_demo.json_extraction import compact, json_extraction
from examples.train_demo.python_functions import python_function
from examples.train_demo.rewriting import rewriting
from examples.train_demo.words import Item, Source


def _turn(s: Source, first: Item, ask: str, answer: str) -> Item:
    if s.chance(0.3):
        bare = ask.rstrip(".?!")
        lower = bare[0].lower() + bare[1:]
        polite = (
            "{b}, please.|Please {l}.|Can you {l}?|Now {l}.|Could you {l}, please?|"
            "Ok, {l}.|And {l}.|{b} please|Thanks. {b}."
        )
        ask = s.phrase(polite).format(b=bare, l=lower)
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
    keys = list(values)
    kind = s.rng.choice(["only", "without", "reverse", "change", "rename"])
    key = s.rng.choice(keys)
    if kind == "only":
        ask = s.phrase(
            "Only {k}.|Now only {k}.|Just {k}, please.|Only the {k}.|And only {k}?|"
            "Give me only {k}."
        )
        return _turn(s, first, ask.format(k=key), compact({key: values[key]}))
    if kind == "without":
        ask = s.phrase(
            "Without {k}.|Leave out {k}.|Now without {k}.|Drop {k}.|Remove {k}.|"
            "The same without {k}, please."
        )
        return _turn(
            s, first, ask.format(k=key), compact({k: v for k, v in values.items() if k != key})
        )
    if kind == "reverse":
        ask = s.phrase(
            "Reverse the order of the keys.|Now the keys in reverse order.|"
            "In the opposite order, please.|Turn the order of the keys around."
        )
        return _turn(s, first, ask, compact(dict(reversed(values.items()))))
    if kind == "rename":
        new = s.invented(1)
        ask = s.phrase(
            "Call {k} {n}.|Rename {k} to {n}.|Use {n} instead of {k}.|Name the key {k} {n} instead."
        )
        return _turn(
            s,
            first,
            ask.format(k=key, n=new),
            compact({new if k == key else k: v for k, v in values.items()}),
        )
    new_value: str | int = s.rng.randint(2, 99) if isinstance(values[key], int) else s.name()
    ask = s.phrase(
        "Change {k} to {n}.|Set {k} to {n}.|Now {k} is {n}.|Make {k} {n}.|"
        "{k} should be {n}.|Replace {k} by {n}."
    )
    return _turn(s, first, ask.format(k=key, n=new_value), compact(values | {key: new_value}))


def _list(s: Source) -> Item:
    """Ask for the list of an answer the other way round, or for a part of it."""
    while True:
        first = rewriting(s)
        words = first.answer.split(", ")
        if len(words) > 1 and first.question.count(words[-1]) and "_" not in first.question:
            break
    kind = s.rng.choice(["reverse", "first", "last", "add", "without"])
    if kind == "reverse":
        ask = s.phrase(
            "Now reverse that.|And the other way round?|Now backwards.|"
            "In the opposite order, please.|Turn it around.|Reverse it again.|"
            "Now the reverse."
        )
        return _turn(s, first, ask, ", ".join(words[::-1]))
    if kind in ("first", "last"):
        ask = s.phrase(
            f"What is the {kind} one?|Only the {kind}.|Now only the {kind} one.|"
            f"Which one is {kind}?|Just the {kind}, please."
        )
        return _turn(s, first, ask, words[0 if kind == "first" else -1])
    if kind == "without":
        gone = s.rng.choice(words)
        ask = s.phrase("Without {w}.|Remove {w}.|Leave out {w}.|Drop {w}, please.|Now without {w}.")
        return _turn(s, first, ask.format(w=gone), ", ".join(w for w in words if w != gone))
    new = str(s.rng.randint(1, 99)) if words[0].isdigit() else s.plain_word()
    ask = s.phrase(
        "Add {w} at the end.|Append {w}.|Put {w} at the end.|"
        "And {w} as the last one.|Add {w} to the end."
    )
    return _turn(s, first, ask.format(w=new), ", ".join([*words, new]))


def _code(s: Source) -> Item:
    """Ask for another function name or argument name."""
    first = python_function(s)
    match = re.match(r"def (\w+)\((\w+)", first.answer)
    assert match is not None
    new = s.invented() if s.chance(0.7) else s.rng.choice("f g run compute helper solve go".split())
    if s.chance(0.6):
        ask = s.phrase(
            "Call it {n}.|Rename it to {n}.|Name it {n}.|"
            "Now call the function {n}.|The name should be {n}.|Use the name {n}.|"
            "Rename the function to {n}, please."
        )
        return _turn(
            s, first, ask.format(n=new), re.sub(rf"\b{match[1]}\(", f"{new}(", first.answer)
        )
    ask = s.phrase(
        "Call the argument {n}.|Rename {o} to {n}.|Use {n} instead of {o}.|"
        "Replace {o} by {n}.|Rename the argument {o} to {n}."
    )
    answer = re.sub(rf"\b{match[2]}\b", new, first.answer)
    return _turn(s, first, ask.format(n=new, o=match[2]), answer)


def _sum(s: Source) -> Item:
    """Continue with the result: plus, minus, times."""
    rng = s.rng
    while True:
        sign = rng.choice("+-*/")
        a, b, c = operands(rng, sign)
        if 1 < c < LIMIT:
            break
    spoken = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
    asked = rng.choice([f"{a} {spoken[sign]} {b}", f"{a}{sign}{b}", f"{a} {sign} {b}"])
    question = s.phrase("What is {}?|{}|How much is {}?|Calculate {}.|{} = ?|What's {}?").format(
        asked
    )
    first = s.item("arithmetic", question, f"{a}{sign}{b}={c}")
    options = ["+", "-"] + (["*"] if 2 * c <= LIMIT else [])
    then = rng.choice(options)
    top = {"+": LIMIT - c, "-": c - 1, "*": LIMIT // c}[then]
    low = 2 if then == "*" else 1
    d = rng.randint(low, max(low, min(top, 12 if then == "*" else 60)))
    result = {"+": c + d, "-": c - d, "*": c * d}[then]
    verb = {
        "+": "Plus {d}.|Add {d}.|And plus {d}?|Now add {d}.|Add {d} to that.|"
        "And {d} more?|Plus {d}?",
        "-": "Minus {d}.|Subtract {d}.|And minus {d}?|Now subtract {d}.|"
        "Take {d} away.|Take away {d} from that.|Minus {d}?",
        "*": "Times {d}.|Multiply by {d}.|And times {d}?|Now multiply it by {d}.|"
        "Multiply that by {d}.|Times {d}?",
    }[then]
    return _turn(s, first, s.phrase(verb).format(d=d), f"{c}{then}{d}={result}")


def second_turn(s: Source) -> Item:
    return s.rng.choice([_json, _json, _list, _list, _code, _sum])(s)
