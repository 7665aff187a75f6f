"""One-line Python functions: an aggregate of a mapping of a filter, over numbers or words."""

import random

from examples.train_demo.words import Item


def _filter(rng: random.Random) -> tuple[str, str, str]:
    k = rng.randint(2, 30)
    return rng.choice([
        ("", "", ""), ("even ", "", "x % 2 == 0"), ("odd ", "", "x % 2 == 1"),
        ("positive ", "", "x > 0"), ("negative ", "", "x < 0"),
        ("", f" greater than {k}", f"x > {k}"), ("", f" less than {k}", f"x < {k}"),
        ("", f" divisible by {k}", f"x % {k} == 0"), ("", f" different from {k}", f"x != {k}"),
    ])  # fmt: skip


def _map(rng: random.Random) -> tuple[str, str]:
    k = rng.randint(2, 30)
    return rng.choice([
        ("", "x"), ("", "x"), ("squares of the ", "x * x"), ("cubes of the ", "x * x * x"),
        ("doubles of the ", "2 * x"), ("absolute values of the ", "abs(x)"),
        (f"products with {k} of the ", f"x * {k}"), (f"sums with {k} of the ", f"x + {k}"),
    ])  # fmt: skip


AGGREGATES = {
    "total": ("the sum of the ", "sum({})"),
    "count": ("the number of ", "sum(1 {})"),
    "largest": ("the largest of the ", "max({})"),
    "smallest": ("the smallest of the ", "min({})"),
    "collect": ("a list of the ", "[{}]"),
    "ordered": ("a sorted list of the ", "sorted({})"),
    "distinct": ("a set of the ", "set({})"),
}


def _called(rng: random.Random, default: str) -> tuple[str, str]:
    """A function name, and the words that ask for it."""
    if rng.random() < 0.5:
        return default, ""
    verb = rng.choice("get find compute take make my do run".split())
    name = f"{verb}_{default}"
    return name, rng.choice([f" called {name}", f" named {name}"])


def _numbers_function(rng: random.Random) -> tuple[str, str]:
    aggregate = rng.choice(list(AGGREGATES))
    before, after, test = _filter(rng)
    mapped, value = _map(rng) if aggregate != "count" else ("", "x")
    words, call = AGGREGATES[aggregate]
    name, called = _called(rng, aggregate)
    values = rng.choice("numbers numbers values items data nums scores".split())
    loop = f"for x in {values}" + (f" if {test}" if test else "")
    if aggregate == "count":
        body = call.format(loop)
    else:
        body = call.format(f"{value} {loop}")
    where = "in a list" + (f" called {values}" if values != "numbers" else "")
    subject = f"{words}{mapped}{before}numbers{after} {where}"
    return _ask(rng, called, subject), f"def {name}({values}):\n    return {body}"


def _words_function(rng: random.Random) -> tuple[str, str]:
    k, letter = rng.randint(2, 12), rng.choice("abcdefghijklmnoprstuvw")
    phrase, test = rng.choice([
        (f"longer than {k} letters", f"len(w) > {k}"),
        (f"shorter than {k} letters", f"len(w) < {k}"),
        (f"that start with {letter}", f"w.startswith('{letter}')"),
        (f"that end with {letter}", f"w.endswith('{letter}')"),
        (f"that contain {letter}", f"'{letter}' in w"),
    ])  # fmt: skip
    kind = rng.choice(["list", "count", "upper", "lengths", "reversed"])
    words, body = {
        "list": ("a list of the words ", "[w {}]"),
        "count": ("the number of words ", "sum(1 {})"),
        "upper": ("the words in upper case ", "[w.upper() {}]"),
        "lengths": ("the lengths of the words ", "[len(w) {}]"),
        "reversed": ("the reversed words ", "[w[::-1] {}]"),
    }[kind]
    name, called = _called(rng, f"{kind}_words")
    body = body.format(f"for w in text.split() if {test}")
    return _ask(rng, called, f"{words}{phrase} in a text"), f"def {name}(text):\n    return {body}"


def _ask(rng: random.Random, called: str, subject: str) -> str:
    return rng.choice(
        ["Write a Python function", "Write a function", "Define a Python function"]
    ) + (f"{called} that returns {subject}.")


def python_function(rng: random.Random) -> Item:
    return Item("code", *rng.choice([_numbers_function, _numbers_function, _words_function])(rng))
