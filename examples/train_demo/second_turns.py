"""A second turn that changes the first: another number, another order, another name."""

import json
import re

from examples.train_demo.arithmetic import LIMIT, arithmetic, operands
from examples.train_demo.json_extraction import compact, json_extraction
from examples.train_demo.python_functions import python_function
from examples.train_demo.rewriting import rewriting
from examples.train_demo.word_problems import word_problem
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
            "Give me only {k}.|"
            "I only need {k}.|Keep only {k}.|Nothing but {k}.|{k} alone.|I want {k} only.|"
            "Reduce it to {k}.|And if I want only {k}?"
        )
        return _turn(s, first, ask.format(k=key), compact({key: values[key]}))
    if kind == "without":
        ask = s.phrase(
            "Without {k}.|Leave out {k}.|Now without {k}.|Drop {k}.|Remove {k}.|"
            "The same without {k}, please.|"
            "I do not need {k}.|Delete {k}.|Take {k} out.|Skip {k}.|And without {k}?|No {k}.|"
            "Omit {k}.|Everything but {k}.|Cut {k}."
        )
        return _turn(
            s, first, ask.format(k=key), compact({k: v for k, v in values.items() if k != key})
        )
    if kind == "reverse":
        ask = s.phrase(
            "Reverse the order of the keys.|Now the keys in reverse order.|"
            "In the opposite order, please.|Turn the order of the keys around.|"
            "Flip the order of the keys.|Last key first.|Now start with the last key.|"
            "Swap the order.|Keys the other way round."
        )
        return _turn(s, first, ask, compact(dict(reversed(values.items()))))
    if kind == "rename":
        new = s.invented(1)
        ask = s.phrase(
            "Call {k} {n}.|Rename {k} to {n}.|Use {n} instead of {k}.|"
            "Name the key {k} {n} instead.|The key {k} should be called {n}.|"
            "Write {n} for the key {k}.|Replace the key {k} by {n}.|"
            "{k} should be named {n}.|Change the key {k} to {n}.|Let the key {k} be {n}."
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
        "{k} should be {n}.|Replace {k} by {n}.|"
        "Use {n} for {k}.|Put {n} as {k}.|Update {k} to {n}.|It should say {n} for {k}.|"
        "The {k} is {n}.|Let {k} be {n}.|Correct {k}: {n}.|{k} is wrong, it is {n}."
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
            "Now the reverse.|"
            "Other way round.|Flip it.|From last to first.|Reverse the order.|Backwards, please.|"
            "And in reverse?|Now from the end."
        )
        return _turn(s, first, ask, ", ".join(words[::-1]))
    if kind in ("first", "last"):
        ask = s.phrase(
            f"What is the {kind} one?|Only the {kind}.|Now only the {kind} one.|"
            f"Which one is {kind}?|Just the {kind}, please.|Give me the {kind}.|And the {kind}?|"
            f"Tell me the {kind} one.|Keep only the {kind}.|Which comes {kind}?|"
            f"I need the {kind} one."
        )
        return _turn(s, first, ask, words[0 if kind == "first" else -1])
    if kind == "without":
        gone = s.rng.choice(words)
        ask = s.phrase(
            "Without {w}.|Remove {w}.|Leave out {w}.|Drop {w}, please.|Now without {w}.|"
            "Delete {w}.|Take {w} out.|No {w}.|And without {w}?|Skip {w}.|Omit {w}.|"
            "Everything but {w}.|Cut {w}."
        )
        return _turn(s, first, ask.format(w=gone), ", ".join(w for w in words if w != gone))
    new = str(s.rng.randint(1, 99)) if words[0].isdigit() else s.plain_word()
    ask = s.phrase(
        "Add {w} at the end.|Append {w}.|Put {w} at the end.|"
        "And {w} as the last one.|Add {w} to the end.|"
        "Then {w}.|Put {w} last.|Also {w} at the end.|With {w} at the end.|End with {w}.|"
        "Let {w} come last.|Place {w} at the end."
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
            "Rename the function to {n}, please.|"
            "It should be called {n}.|Change the name to {n}.|Give it the name {n}.|"
            "Let the function be {n}.|And if it is called {n}?|Make it {n}.|I want the name {n}.|"
            "Another name: {n}."
        )
        return _turn(
            s, first, ask.format(n=new), re.sub(rf"\b{match[1]}\(", f"{new}(", first.answer)
        )
    ask = s.phrase(
        "Call the argument {n}.|Rename {o} to {n}.|Use {n} instead of {o}.|"
        "Replace {o} by {n}.|Rename the argument {o} to {n}.|"
        "The argument should be {n}.|Let the argument be {n}.|Change {o} to {n}.|"
        "Write {n} for {o}.|The parameter should be called {n}.|{n} as the argument, not {o}."
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
        "And {d} more?|Plus {d}?|"
        "Increase it by {d}.|What if I add {d}?|Then plus {d}.|{d} more.|And another {d}?",
        "-": "Minus {d}.|Subtract {d}.|And minus {d}?|Now subtract {d}.|"
        "Take {d} away.|Take away {d} from that.|Minus {d}?|"
        "Decrease it by {d}.|What if I take {d} away?|Then minus {d}.|{d} less.|And {d} less?",
        "*": "Times {d}.|Multiply by {d}.|And times {d}?|Now multiply it by {d}.|"
        "Multiply that by {d}.|Times {d}?|"
        "Take it times {d}.|What if I multiply by {d}?|Then times {d}.|That {d} times?",
    }[then]
    return _turn(s, first, s.phrase(verb).format(d=d), f"{c}{then}{d}={result}")


def _number(s: Source) -> Item:
    """Ask for the result without the steps."""
    first = s.rng.choice([arithmetic, word_problem])(s)
    ask = s.phrase(
        "Only the number.|Give only the number.|Just the number, please.|Only the result.|"
        "Just the result.|Only the answer, please.|I only need the number.|Give just the result.|"
        "The result only.|The number alone.|Without the steps.|Leave out the steps.|"
        "What is the result?|And the number alone?|Only the final number.|In one number."
    )
    return _turn(s, first, ask, re.findall(r"\d+", first.answer)[-1])


def second_turn(s: Source) -> Item:
    return s.rng.choice([_json, _json, _list, _list, _code, _sum, _number])(s)
