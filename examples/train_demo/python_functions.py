"""Small Python functions: an aggregate of a mapping of a filter over a list, and known ones."""

from typing import NamedTuple

from examples.train_demo.words import Item, Source, bank

BANK = bank("python_functions")


class Known(NamedTuple):
    """A well-known function, and how questions name it after "a function that" and "to"."""

    arguments: str
    body: str
    that: list[str]
    to: list[str]


KNOWN = {name: Known(**parts) for name, parts in BANK["known"].items()}


class Wanted(NamedTuple):
    """A function, and the words that ask for it: a name, and what comes after "that" and "to"."""

    called: str
    that: str
    to: str
    code: str


class Filter(NamedTuple):
    before: str
    after: str
    test: str


def _filter(s: Source) -> Filter:
    k = s.rng.randint(2, 30) if s.chance(0.8) else s.rng.choice([0, 1, 50, 100])
    said = {name: s.phrase(texts) for name, texts in BANK["comparing"].items()}
    said = {name: t.format(k) if "{}" in t else f"{t} {k}" for name, t in said.items()}
    before, after, test = s.rng.choice(BANK["filters"])
    if k < 2 and "divisible" in after:
        before, after, test = "even ", "", "x % 2 == 0"
    return Filter(before, after.format(**said), test.format(k=k))


def _called(s: Source, default: str) -> tuple[str, str]:
    """Return a function name, and the words that ask for it."""
    if s.chance(0.6):
        return default, ""
    name = s.rng.choice("get find compute take make my do run".split()) + "_" + default
    if s.chance(0.6):
        name = s.invented() if s.chance(0.7) else f"{s.invented(1)}_{s.invented(1)}"
    return name, s.phrase([" called {}", " named {}", " with the name {}", " {}"]).format(name)


def _numbers_function(s: Source) -> Wanted:
    aggregate = s.rng.choice(list(BANK["numbers"]))
    keep = _filter(s)
    mapped, value = "", "x"
    if aggregate not in ("count", "collect") or s.chance(0.3):
        k = s.rng.randint(2, 30)
        mapped, value = (text.format(k=k) for text in s.rng.choice(BANK["maps"]))
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
        named = " in a list called {}| of a list {}| from the list {}| in a list named {}"
        where = s.phrase(named).format(values)
    name, called = _called(s, aggregate)
    if aggregate in ("largest", "smallest") and not mapped and s.chance(0.4):
        what = f"{keep.before}number{keep.after}"
        asks = BANK["one_number"][aggregate]
    that, to = (s.phrase(asks[way]).format(what) + where for way in ("returns", "to"))
    return Wanted(called, f"returns {that}", to, f"def {name}({values}):\n    return {body}")


def _words_function(s: Source) -> Wanted:
    values = {"k": s.rng.randint(2, 12), "letter": s.rng.choice("abcdefghijklmnopqrstuvwxyz")}
    values["length"] = s.rng.choice(["letters", "letters", "characters"])
    filters = [(s.phrase(keep["said"]), keep) for keep in BANK["word_filters"]]
    said, keep = s.rng.choice(filters)
    what = f"{said} {keep['what']}".format(**values)
    kind = s.rng.choice(["list", "count", "upper", "lengths", "reversed"])
    asks = BANK["words"][kind]
    name, called = _called(s, f"{kind}_words")
    where = s.phrase(" in a text| of a text| in a string| of a sentence|")
    body = asks["call"].format(f"for word in text.split() if {keep['test'].format(**values)}")
    that, to = (s.phrase(asks[way]).format(what) + where for way in ("returns", "to"))
    return Wanted(called, f"returns {that}", to, f"def {name}(text):\n    return {body}")


def _known_function(s: Source) -> Wanted:
    default = s.rng.choice(list(KNOWN))
    arguments, body, that, to = KNOWN[default]
    name, called = _called(s, default)
    if default in ("factorial", "fibonacci", "product"):
        body = body.replace(default + "(", name + "(")
    return Wanted(called, s.phrase(that), s.phrase(to), f"def {name}({arguments}):\n    {body}")


def _divisible_function(s: Source, k: int) -> Wanted:
    name, called = _called(s, "is_divisible")
    what = s.phrase("a number {}|n {}|an integer {}")
    what = what.format(s.phrase("is divisible by {}|can be divided by {}")).format(k)
    that = s.phrase("checks whether|tells if|returns whether|tests if")
    to = s.phrase("check if|test whether|find out if|tell if")
    code = f"def {name}(n):\n    return n % {k} == 0"
    return Wanted(called, f"{that} {what}", f"{to} {what}", code)


def _each_function(s: Source) -> Wanted:
    """Return a function of each number of a list, or one that tests a number for a divisor."""
    k = s.rng.randint(2, 30)
    if s.chance(0.15):
        return _divisible_function(s, k)
    verb = s.rng.choice(list(BANK["each"]))
    that, to, after, value = (text.format(k) for text in BANK["each"][verb].values())
    what = s.phrase(BANK["each_number"])
    what += after + s.phrase(" in a list| of a list|| in the list")
    name, called = _called(s, verb)
    code = f"def {name}(numbers):\n    return [{value} for x in numbers]"
    return Wanted(called, f"{that} {what}", f"{to} {what}", code)


def python_function(s: Source) -> Item:
    makers = _numbers_function, _words_function, _known_function, _each_function
    (make,) = s.rng.choices(makers, (0.4, 0.2, 0.25, 0.15))
    called, that, to, code = make(s)
    if not called and that.startswith("returns ") and s.chance(0.3):
        noun = that.removeprefix("returns ")
        if not noun.startswith("whether"):
            return s.item("code", s.phrase(BANK["ask_noun"]).format(n=noun), code)
    if s.chance(0.5):
        return s.item("code", s.phrase(BANK["ask_that"]).format(c=called, t=that), code)
    asks = [ask for ask in BANK["ask_to"] if "{c}" in ask or not called]
    return s.item("code", s.phrase(asks).format(c=called, t=to), code)
