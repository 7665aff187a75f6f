"""Small Python functions: an aggregate of a mapping of a filter over a list, and known ones."""

from typing import NamedTuple

from examples.train_demo.known_functions import KNOWN
from examples.train_demo.words import Item, Source

LETTERS = "abcdefghijklmnopqrstuvwxyz"


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
    return s.rng.choice(
        [
            ("", "x"),
            ("", "x"),
            ("", "x"),
            ("squares of the ", "x * x"),
            ("cubes of the ", "x * x * x"),
            ("doubles of the ", "2 * x"),
            ("absolute values of the ", "abs(x)"),
            ("squared ", "x * x"),
            ("doubled ", "2 * x"),
            (f"products with {k} of the ", f"x * {k}"),
            (f"sums with {k} of the ", f"x + {k}"),
        ]
    )


AGGREGATES = {  # the call; after "returns"; after "to"
    "total": (
        "sum({})",
        "the sum of the {}|the sum of all {}|the total of the {}",
        "sum the {}|add up the {}|sum up all {}|add all the {}|compute the sum of the {}",
    ),
    "count": (
        "sum(1 {})",
        "the number of {}|how many {} there are|the count of {}",
        "count the {}|count all {}|count how many {} there are|find the number of {}",
    ),
    "largest": (
        "max({})",
        "the largest of the {}|the maximum of the {}|the biggest of the {}",
        "find the largest of the {}|get the maximum of the {}|find the biggest of the {}",
    ),
    "smallest": (
        "min({})",
        "the smallest of the {}|the minimum of the {}|the lowest of the {}",
        "find the smallest of the {}|get the minimum of the {}|find the lowest of the {}",
    ),
    "collect": (
        "[{}]",
        "a list of the {}|the {}|all {}|only the {}",
        "list the {}|collect the {}|get all {}|keep only the {}|find all {}",
    ),
    "ordered": (
        "sorted({})",
        "a sorted list of the {}|the {} in order|the {} sorted",
        "sort the {}|put the {} in order|order the {}",
    ),
    "distinct": (
        "set({})",
        "a set of the {}|the set of {}|the distinct {}",
        "collect the {} in a set|make a set of the {}|get the distinct {}",
    ),
}


def _called(s: Source, default: str) -> tuple[str, str]:
    """Return a function name, and the words that ask for it."""
    if s.chance(0.6):
        return default, ""
    name = s.rng.choice("get find compute take make my do run".split()) + "_" + default
    if s.chance(0.6):
        name = s.invented() if s.chance(0.7) else f"{s.invented(1)}_{s.invented(1)}"
    return name, s.phrase([" called {}", " named {}", " with the name {}", " {}"]).format(name)


def _numbers_function(s: Source) -> tuple[str, str, str, str]:
    aggregate = s.rng.choice(list(AGGREGATES))
    keep = _filter(s)
    mapped, value = _map(s) if aggregate not in ("count", "collect") or s.chance(0.3) else ("", "x")
    if aggregate == "count":
        mapped, value = "", "x"
    call, returned, wanted = AGGREGATES[aggregate]
    values = s.rng.choice("numbers numbers numbers values items data nums scores".split())
    if s.chance(0.1):
        values = s.invented(1)
    loop = f"for x in {values}" + (f" if {keep.test}" if keep.test else "")
    body = call.format(loop if aggregate == "count" else f"{value} {loop}")
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
        returned = (
            "the largest {}|the biggest {}|the maximum {}"
            if aggregate == "largest"
            else "the smallest {}|the lowest {}|the minimum {}"
        )
        wanted = (
            "find the largest {}|get the biggest {}|pick the maximum {}"
            if aggregate == "largest"
            else "find the smallest {}|get the lowest {}|pick the minimum {}"
        )
    return (
        called,
        f"returns {s.phrase(returned).format(what)}{where}",
        f"{s.phrase(wanted).format(what)}{where}",
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
    returned, wanted, body = {
        "list": (
            "a list of the words {}|the words {}|all words {}",
            "list the words {}|get all words {}|find the words {}|collect words {}",
            "[word {}]",
        ),
        "count": (
            "the number of words {}|how many words there are {}",
            "count the words {}|count words {}|find the number of words {}",
            "sum(1 {})",
        ),
        "upper": (
            "the words in upper case {}|the uppercase words {}",
            "turn into upper case the words {}|uppercase the words {}",
            "[word.upper() {}]",
        ),
        "lengths": (
            "the lengths of the words {}|the length of every word {}",
            "get the lengths of the words {}|list the lengths of words {}",
            "[len(word) {}]",
        ),
        "reversed": (
            "the reversed words {}|the words, each reversed, {}",
            "reverse the words {}|turn around the words {}",
            "[word[::-1] {}]",
        ),
    }[kind]
    name, called = _called(s, f"{kind}_words")
    where = s.phrase(" in a text| of a text| in a string| of a sentence|")
    loop = f"for word in text.split() if {test}"
    return (
        called,
        f"returns {s.phrase(returned).format(phrase)}{where}",
        f"{s.phrase(wanted).format(phrase)}{where}",
        f"def {name}(text):\n    return {body.format(loop)}",
    )


def _known_function(s: Source) -> tuple[str, str, str, str]:
    default = s.rng.choice(list(KNOWN))
    arguments, body, that, to = KNOWN[default]
    name, called = _called(s, default)
    if default in ("factorial", "fibonacci", "product"):
        body = body.replace(default + "(", name + "(")
    return called, s.phrase(that), s.phrase(to), f"def {name}({arguments}):\n    {body}"


EACH = {  # what is done to each number: after "that", after "to", after the number, the value
    "double": ("doubles", "double", "", "2 * x"), "triple": ("triples", "triple", "", "3 * x"),
    "square": ("squares", "square", "", "x * x"), "halve": ("halves", "halve", "", "x / 2"),
    "add": ("adds {} to", "add {} to", "", "x + {}"),
    "subtract": ("subtracts {} from", "subtract {} from", "", "x - {}"),
    "multiply": ("multiplies", "multiply", " by {}", "x * {}"),
    "divide": ("divides", "divide", " by {}", "x / {}"),
}  # fmt: skip


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
    verb = s.rng.choice(list(EACH))
    that, to, after, value = (part.format(k) for part in EACH[verb])
    what = s.phrase(
        "every number|each number|all numbers|each element|every value|all the numbers|"
        "every element"
    )
    what += after + s.phrase(" in a list| of a list|| in the list")
    name, called = _called(s, verb)
    return (
        called,
        f"{that} {what}",
        f"{to} {what}",
        f"def {name}(numbers):\n    return [{value} for x in numbers]",
    )


ASKS_THAT = (
    "Write a Python function{c} that {t}.|Write a function{c} that {t}.|"
    "Define a Python function{c} that {t}.|I need a function{c} that {t}.|"
    "Give me a Python function{c} that {t}.|"
    "Can you write a function{c} that {t}?|"
    "Please write a Python function{c} that {t}.|"
    "Implement a function{c} that {t}.|"
    "Make a Python function{c} which {t}.|Python function{c} that {t}|"
    "Code a function{c} that {t}.|"
    "Create a function{c} that {t}.|Show me a Python function{c} that {t}.|"
    "I want a Python function{c} which {t}.|"
    "How does a function{c} look that {t}?|"
    "Program a function{c} that {t}.|Write me a function{c} that {t}.|"
    "Write me a Python function{c} that {t}.|Help me write a function{c} that {t}.|"
    "I am looking for a function{c} that {t}.|A function{c} that {t}|"
    "A Python function{c} that {t}, please.|Could I have a function{c} that {t}?|"
    "Build a function{c} that {t}.|Provide a Python function{c} that {t}.|"
    "Let me have a function{c} which {t}.|Write some Python: a function{c} that {t}.|"
    "In Python, a function{c} that {t}."
)
ASKS_TO = (
    "Write a Python function{c} to {t}.|Write a function{c} to {t}.|"
    "How do I {t} in Python?|Python code to {t}|Write Python code to {t}.|"
    "Define a function{c} to {t}.|I need a function{c} to {t}.|"
    "Give me a Python function{c} to {t}.|How can I {t} with Python?|"
    "Please write a function{c} to {t}.|Implement a function{c} to {t}.|"
    "In Python, {t}.|Write a short function{c} to {t}.|"
    "Create a Python function{c} to {t}.|"
    "Can you write a Python function{c} to {t}?|"
    "What is a Python function{c} to {t}?|python function{c} to {t}|"
    "Write me a function{c} to {t}.|Help me {t} in Python.|I want to {t} in Python.|"
    "What is the way to {t} in Python?|Show me how to {t} in Python.|Write Python to {t}.|"
    "Make a function{c} to {t}.|Is there a function{c} to {t}?|"
    "Provide a Python function{c} to {t}.|Using Python, {t}.|Code to {t}|"
    "A Python function{c} to {t}, please.|I have to {t}. Write a Python function{c}.|"
    "With Python, {t}.|Program a function{c} to {t}."
)


ASKS_NOUN = (
    "Python: {n}|{n}, in Python|A function for {n}|I need {n} in Python.|"
    "Code for {n}|How do I get {n} in Python?|"
    "What is the Python code for {n}?|Function giving {n}|"
    "A Python function returning {n}, please.|"
    "Write code that computes {n}.|Please write Python for {n}.|"
    "How can I get {n} with Python?|python {n}|"
    "Give me a function for {n}.|I want to have {n}. Write it in Python.|"
    "Show me how to get {n} in Python.|Write a function: {n}|"
    "In Python, what gives me {n}?"
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
            return s.item("code", s.phrase(ASKS_NOUN).format(n=noun), answer)
    if s.chance(0.5):
        return s.item("code", s.phrase(ASKS_THAT).format(c=called, t=that), answer)
    asks = ASKS_TO
    if called:
        asks = "|".join(a for a in ASKS_TO.split("|") if "{c}" in a)
    return s.item("code", s.phrase(asks).format(c=called, t=to), answer)
