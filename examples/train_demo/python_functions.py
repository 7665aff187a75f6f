"""Small Python functions: an aggregate of a mapping of a filter over a list, and known ones."""

from typing import NamedTuple

from examples.train_demo.words import Item, Source, bank

BANK = bank("python_functions")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Known(NamedTuple):
    """A well-known function, and how questions name it after "a function that" and "to"."""

    arguments: str
    body: str
    that: list[str]
    to: list[str]


KNOWN = {name: Known(**parts) for name, parts in BANK["known"].items()}


class Filter(NamedTuple):
    before: str
    after: str
    test: str


def _filter(s: Source) -> Filter:
    k = s.rng.randint(2, 30) if s.chance(0.8) else s.rng.choice([0, 1, 50, 100])
    above = s.phrase("greater than|above|larger than|bigger than|over|more than")
    below = s.phrase("less than|below|smaller than|under|lower than")
    divisible = s.phrase(
        "divisible by|that are multiples of|which can be divided by|that {} divides"
    ).format(k)
    if str(k) not in divisible:
        divisible = f"{divisible} {k}"
    return s.rng.choice(
        [
            Filter("", "", ""),
            Filter("even ", "", "x % 2 == 0"),
            Filter("odd ", "", "x % 2 == 1"),
            Filter("positive ", "", "x > 0"),
            Filter("negative ", "", "x < 0"),
            Filter("", f" {above} {k}", f"x > {k}"),
            Filter("", f" {below} {k}", f"x < {k}"),
            Filter("", f" {divisible}", f"x % {max(k, 2)} == 0")
            if k > 1
            else Filter("even ", "", "x % 2 == 0"),
            Filter("", f" {s.phrase('different from|not equal to|other than')} {k}", f"x != {k}"),
        ]
    )


def _map(s: Source) -> tuple[str, str]:
    k = s.rng.randint(2, 30)
    what, value = s.rng.choice(BANK["maps"])
    return what.format(k=k), value.format(k=k)


def _called(s: Source, default: str) -> tuple[str, str]:
    """Return a function name, and the words that ask for it."""
    if s.chance(0.6):
        return default, ""
    name = s.rng.choice("get find compute take make my do run".split()) + "_" + default
    if s.chance(0.6):
        name = s.invented() if s.chance(0.7) else f"{s.invented(1)}_{s.invented(1)}"
    return name, s.phrase([" called {}", " named {}", " with the name {}", " {}"]).format(name)


def _numbers_function(s: Source) -> tuple[str, str, str, str]:
    aggregate = s.rng.choice(list(BANK["numbers"]))
    keep = _filter(s)
    mapped, value = _map(s) if aggregate not in ("count", "collect") or s.chance(0.3) else ("", "x")
    if aggregate == "count":
        mapped, value = "", "x"
    asks = BANK["numbers"][aggregate]
    values = s.rng.choice("numbers numbers numbers values items data nums scores".split())
    if s.chance(0.1):
        values = s.invented(1)
    loop = f"for x in {values}" + (f" if {keep.test}" if keep.test else "")
    body = asks["call"].format(loop if aggregate == "count" else f"{value} {loop}")
    noun = s.rng.choice(["numbers", "numbers", "values", "elements"])
    what = f"{mapped}{keep.before}{noun}{keep.after}"
    where = s.phrase(" in a list| of a list| from a list| in a given list|")
    if values != "numbers":
        where = s.phrase(
            " in a list called {}| of a list {}| from the list {}| in a list named {}"
        ).format(values)
    name, called = _called(s, aggregate)
    if aggregate in ("largest", "smallest") and not mapped and s.chance(0.4):
        what = f"{keep.before}number{keep.after}"
        asks = BANK["one_number"][aggregate]
    return (
        called,
        f"returns {s.phrase(asks['returns']).format(what)}{where}",
        f"{s.phrase(asks['to']).format(what)}{where}",
        f"def {name}({values}):\n    return {body}",
    )


def _words_function(s: Source) -> tuple[str, str, str, str]:
    k, letter = s.rng.randint(2, 12), s.rng.choice(LETTERS)
    length = s.rng.choice(["letters", "letters", "characters"])
    phrase, test = s.rng.choice(
        [
            (f"{s.phrase('longer than|with more than')} {k} {length}", f"len(word) > {k}"),
            (f"{s.phrase('shorter than|with fewer than')} {k} {length}", f"len(word) < {k}"),
            (
                f"{s.phrase('that start with|beginning with|starting with')} {letter}",
                f"word.startswith('{letter}')",
            ),
            (
                f"{s.phrase('that end with|ending with|ending in')} {letter}",
                f"word.endswith('{letter}')",
            ),
            (
                f"{s.phrase('that contain|containing|with the letter')} {letter}",
                f"'{letter}' in word",
            ),
        ]
    )
    kind = s.rng.choice(["list", "count", "upper", "lengths", "reversed"])
    asks = BANK["words"][kind]
    name, called = _called(s, f"{kind}_words")
    where = s.phrase(" in a text| of a text| in a string| of a sentence|")
    loop = f"for word in text.split() if {test}"
    return (
        called,
        f"returns {s.phrase(asks['returns']).format(phrase)}{where}",
        f"{s.phrase(asks['to']).format(phrase)}{where}",
        f"def {name}(text):\n    return {asks['call'].format(loop)}",
    )


def _known_function(s: Source) -> tuple[str, str, str, str]:
    default = s.rng.choice(list(KNOWN))
    arguments, body, that, to = KNOWN[default]
    name, called = _called(s, default)
    if default in ("factorial", "fibonacci", "product"):
        body = body.replace(default + "(", name + "(")
    return called, s.phrase(that), s.phrase(to), f"def {name}({arguments}):\n    {body}"


def _each_function(s: Source) -> tuple[str, str, str, str]:
    """Return a function of each number of a list, or one that tests a number for a divisor."""
    k = s.rng.randint(2, 30)
    if s.chance(0.15):
        name, called = _called(s, "is_divisible")
        what = s.phrase("a number {}|n {}|an integer {}")
        what = what.format(s.phrase("is divisible by {}|can be divided by {}")).format(k)
        return (
            called,
            f"{s.phrase('checks whether|tells if|returns whether|tests if')} {what}",
            f"{s.phrase('check if|test whether|find out if|tell if')} {what}",
            f"def {name}(n):\n    return n % {k} == 0",
        )
    verb = s.rng.choice(list(BANK["each"]))
    parts = BANK["each"][verb]
    that, to, after, value = (parts[p].format(k) for p in ("that", "to", "after", "value"))
    what = s.phrase(BANK["each_number"])
    what += after + s.phrase(" in a list| of a list|| in the list")
    name, called = _called(s, verb)
    return (
        called,
        f"{that} {what}",
        f"{to} {what}",
        f"def {name}(numbers):\n    return [{value} for x in numbers]",
    )


def python_function(s: Source) -> Item:
    make = s.rng.choices(
        (_numbers_function, _words_function, _known_function, _each_function),
        (0.4, 0.2, 0.25, 0.15),
    )[0]
    called, that, to, answer = make(s)
    if not called and that.startswith("returns ") and s.chance(0.3):
        noun = that.removeprefix("returns ")
        if not noun.startswith("whether"):
            return s.item("code", s.phrase(BANK["ask_noun"]).format(n=noun), answer)
    if s.chance(0.5):
        return s.item("code", s.phrase(BANK["ask_that"]).format(c=called, t=that), answer)
    asks = [ask for ask in BANK["ask_to"] if "{c}" in ask or not called]
    return s.item("code", s.phrase(asks).format(c=called, t=to), answer)
