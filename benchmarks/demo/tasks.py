"""Three small tasks with exact answers: word problems, Python functions and JSON extraction.

A question belongs to the held-out split when its hash says so, hence the splits are disjoint.
`python -m benchmarks.demo.tasks` checks the generators: every equation and every function is run.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable
from typing import NamedTuple

FIRST = (
    "Lily Tom Anna Ben Mia Sam Zoe Max Emma Leo Ella Jack Nina Paul Ruth Omar Ivy Noah Clara Finn "
    "Maya Alex Lucy Hugo Sara Carl Rosa Eric Jane Adam Vera Ryan Dina Mark Gina Luke Tina Oscar"
).split()
SHE = set("Lily Anna Mia Zoe Emma Ella Nina Ruth Ivy Clara Maya Lucy Sara Rosa Jane Vera Dina".split())
SHE |= {"Gina", "Tina"}
THINGS = (
    "apples pens books cards marbles stickers shells coins pears cookies stamps flowers eggs toys "
    "balloons pencils cups buttons lemons plums candles badges"
).split()
SYLLABLES = (
    "ba be bi bo bu da de di do du fa fe fi fo ga ge go ha he hi ka ke ki ko la le li lo lu ma me mi "
    "mo mu na ne ni no ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we wi za ze zo "
    "bran dor mel tin vel lan kor stan bel mar nor ren sil tor win"
).split()
JOBS = "nurse teacher baker pilot farmer lawyer painter driver chef engineer doctor writer".split()
LIMIT = 100


class Item(NamedTuple):
    task: str
    question: str
    answer: str


def is_held_out(question: str) -> bool:
    """One question in sixteen is never trained on."""
    return hashlib.sha256(question.encode()).digest()[0] % 16 == 0


def factors(rng: random.Random, top: int = LIMIT) -> tuple[int, int]:
    """Two factors from 2 to 12 whose product is at most `top`."""
    while True:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        if a * b <= top:
            return a, b


def _run(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    while True:
        (a, b), (c, d) = factors(rng), factors(rng)
        if a * b + c * d <= LIMIT:
            break
    verb = rng.choice(["run", "walk", "ride", "swim", "drive", "row"])
    unit = rng.choice(["kilometers", "miles"])
    then = rng.choice(["After that", "Then", "Later"])
    question = (
        f"{name} can {verb} {a} {unit} per hour for {b} hours. {then}, {she} {verb}s {c} {unit} "
        f"per hour. How many {unit} can {she} {verb} in {b + d} hours?"
    )
    return question, (
        f"In the first {b} hours: {a}*{b}={a * b} {unit}. Hours left: {b + d}-{b}={d}. "
        f"In that time: {c}*{d}={c * d} {unit}. In total: {a * b}+{c * d}={a * b + c * d}. "
        f"The answer is {a * b + c * d}."
    )


def _shop(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    while True:
        (a, b), (c, d) = factors(rng), factors(rng)
        if a * b + c * d <= LIMIT:
            break
    x, y = rng.sample(THINGS, 2)
    verb = rng.choice(["buys", "orders", "gets"])
    end = rng.choice([f"How much does {she} pay?", f"How many dollars does {she} spend in total?"])
    question = f"{name} {verb} {a} {x} for {b} dollars each and {c} {y} for {d} dollars each. {end}"
    return question, (
        f"The {x} cost {a}*{b}={a * b} dollars. The {y} cost {c}*{d}={c * d} dollars. "
        f"Together: {a * b}+{c * d}={a * b + c * d}. The answer is {a * b + c * d}."
    )


def _change(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    a, b = factors(rng, LIMIT - 5)
    money = rng.randint(a * b + 1, LIMIT)
    x = rng.choice(THINGS)
    if rng.random() < 0.5:
        question = f"{name} has {money} dollars and buys {a} {x} for {b} dollars each. "
    else:
        question = f"{name} buys {a} {x} at {b} dollars each and pays with {money} dollars. "
    question += rng.choice([f"How many dollars does {she} have left?", "How much money is left?"])
    return question, (
        f"The {x} cost {a}*{b}={a * b} dollars. Left: {money}-{a * b}={money - a * b}. "
        f"The answer is {money - a * b}."
    )


def _boxes(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    a, b = factors(rng)
    x, box = rng.choice(THINGS), rng.choice(["boxes", "bags", "baskets", "rows"])
    start = rng.choice([f"{name} has {a} {box} with {b} {x} in each.", f"There are {a} {box} of {b} {x}."])
    if rng.random() < 0.5:
        c = rng.randint(1, a * b - 1)
        verb = rng.choice(["gives away", "sells", "loses"])
        question = f"{start} {name} {verb} {c} {x}. How many {x} are left?"
        step = f"Left: {a * b}-{c}={(result := a * b - c)}."
    else:
        c = rng.randint(1, max(1, LIMIT - a * b))
        verb = rng.choice(["adds", "finds", "brings"])
        question = f"{start} {name} {verb} {c} more {x}. How many {x} are there now?"
        step = f"Now: {a * b}+{c}={(result := a * b + c)}."
    return question, f"At first: {a}*{b}={a * b} {x}. {step} The answer is {result}."


def _give(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    a = rng.randint(2, 80)
    b = rng.randint(2, min(60, LIMIT - a))
    c = rng.randint(1, a + b - 1)
    x, other = rng.choice(THINGS), rng.choice([n for n in FIRST if n != name])
    verb, gets = rng.choice(["loses", "sells", "gives away"]), rng.choice(["gives", "sends"])
    her = "her" if she == "she" else "him"
    question = (
        f"{name} has {a} {x}. {other} {gets} {her} {b} more. Then {she} {verb} {c}. "
        f"How many {x} does {she} have now?"
    )
    return question, (
        f"With the {x} from {other}: {a}+{b}={a + b}. After that: {a + b}-{c}={a + b - c}. "
        f"The answer is {a + b - c}."
    )


def _share(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    k, q = factors(rng)
    a = rng.randint(1, k * q - 1)
    b = k * q - a
    x, who = rng.choice(THINGS), rng.choice(["friends", "children", "neighbors"])
    verb = rng.choice(["finds", "buys", "makes"])
    question = (
        f"{name} has {a} {x} and {verb} {b} more. {she.capitalize()} shares all of them equally "
        f"among {k} {who}. How many {x} does each get?"
    )
    return question, f"All {x}: {a}+{b}={k * q}. Each gets {k * q}/{k}={q}. The answer is {q}."


def _times(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    a, k = rng.choice([(a, k) for k in range(2, 13) for a in range(2, 13) if a * k + a <= LIMIT])
    x, other = rng.choice(THINGS), rng.choice([n for n in FIRST if n != name])
    end = rng.choice(["in total", "together"])
    question = (
        f"{name} has {a} {x}. {other} has {k} times as many. How many {x} do they have {end}?"
    )
    return question, (
        f"{other} has {k}*{a}={k * a} {x}. Together: {a}+{k * a}={a + k * a}. "
        f"The answer is {a + k * a}."
    )


def _read(rng: random.Random, name: str, she: str) -> tuple[str, str]:
    a, b = factors(rng, LIMIT - 5)
    n = rng.randint(a * b + 1, LIMIT)
    days = rng.choice(["days", "weeks", "evenings"])
    verb, x = rng.choice([("reads", "pages"), ("solves", "puzzles"), ("writes", "letters")])
    question = (
        f"{name} wants to finish {n} {x}. {she.capitalize()} {verb} {a} {x} a {days[:-1]} for {b} "
        f"{days}. How many {x} remain?"
    )
    return question, (
        f"Done so far: {a}*{b}={a * b} {x}. Remaining: {n}-{a * b}={n - a * b}. "
        f"The answer is {n - a * b}."
    )


FAMILIES: tuple[Callable[[random.Random, str, str], tuple[str, str]], ...] = (
    _run, _run, _shop, _change, _boxes, _give, _share, _times, _read,
)  # fmt: skip


def word_problem(rng: random.Random) -> Item:
    name = rng.choice(FIRST)
    she = "she" if name in SHE else "he"
    return Item("math", *rng.choice(FAMILIES)(rng, name, she))


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
    name = f"{verb}_{invented(rng, 1).lower() if rng.random() < 0.5 else default}"
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
        (f"longer than {k} letters", f"len(w) > {k}"), (f"shorter than {k} letters", f"len(w) < {k}"),
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
    return rng.choice(["Write a Python function", "Write a function", "Define a Python function"]) + (
        f"{called} that returns {subject}."
    )


def python_function(rng: random.Random) -> Item:
    return Item("code", *rng.choice([_numbers_function, _numbers_function, _words_function])(rng))


def invented(rng: random.Random, most: int = 3) -> str:
    """A name nobody has heard before, so that copying it is the only way."""
    return "".join(rng.choices(SYLLABLES, k=rng.randint(1, most) + 1)).capitalize()


def _person(rng: random.Random) -> tuple[dict[str, str | int], str]:
    name = invented(rng, 2) if rng.random() < 0.5 else rng.choice(FIRST)
    if rng.random() < 0.5:
        name += " " + invented(rng, 2)
    f: dict[str, str | int] = {
        "name": name, "age": rng.randint(18, 99), "city": invented(rng), "job": rng.choice(JOBS)
    }  # fmt: skip
    a = "an" if str(f["job"])[0] in "aeiou" else "a"
    return f, rng.choice([
        "{name} is {age} years old, lives in {city} and works as {a} {job}.",
        "{name}, {age}, is {a} {job} from {city}.",
        "In {city} lives {name}, {a} {job} who is {age} years old.",
        "At the age of {age}, {name} moved to {city} to work as {a} {job}.",
        "My name is {name}, I am {age} and I work as {a} {job} in {city}.",
    ]).format(a=a, **f)  # fmt: skip


def _order(rng: random.Random) -> tuple[dict[str, str | int], str]:
    f: dict[str, str | int] = {
        "customer": invented(rng, 2), "item": rng.choice(THINGS), "quantity": rng.randint(2, 99),
        "price": rng.randint(2, 199),
    }  # fmt: skip
    return f, rng.choice([
        "{customer} ordered {quantity} {item} for {price} dollars.",
        "We sold {quantity} {item} to {customer} at a price of {price} dollars.",
        "For {price} dollars, {customer} bought {quantity} {item}.",
        "Order: {quantity} {item} for {customer}, {price} dollars in total.",
    ]).format(**f)  # fmt: skip


def _event(rng: random.Random) -> tuple[dict[str, str | int], str]:
    days = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
    f: dict[str, str | int] = {
        "event": rng.choice("meeting concert lecture party workshop race dinner market".split()),
        "place": invented(rng), "day": rng.choice(days), "hour": rng.randint(6, 23),
        "guests": rng.randint(5, 199),
    }  # fmt: skip
    return f, rng.choice([
        "The {event} in {place} starts on {day} at {hour} with {guests} guests.",
        "On {day} at {hour}, {guests} guests come to the {event} in {place}.",
        "{place} hosts a {event} for {guests} guests on {day} at {hour}.",
    ]).format(**f)  # fmt: skip


def json_extraction(rng: random.Random) -> Item:
    values, sentence = rng.choice([_person, _person, _order, _event])(rng)
    keys = rng.sample(list(values), rng.randint(2, len(values)))
    asked = ", ".join(keys[:-1]) + " and " + keys[-1]
    ask = rng.choice(["Extract {} as JSON: ", "Give {} as JSON: ", "Return JSON with {}: "])
    answer = json.dumps({key: values[key] for key in keys}, separators=(",", ":"))
    return Item("json", ask.format(asked) + sentence, answer)


GENERATORS: dict[str, Callable[[random.Random], Item]] = {
    "math": word_problem, "code": python_function, "json": json_extraction
}  # fmt: skip


def draw(rng: random.Random, task: str, held_out: bool) -> Item:
    """The next item of a task from one split."""
    while True:
        item = GENERATORS[task](rng)
        if is_held_out(item.question) is held_out:
            return item


def held_out_items(count: int, seed: int = 1234) -> list[Item]:
    """Distinct held-out items, the tasks taking turns."""
    rng = random.Random(seed)
    items: dict[str, Item] = {}
    names = list(GENERATORS)
    while len(items) < count:
        item = draw(rng, names[len(items) % len(names)], held_out=True)
        items.setdefault(item.question, item)
    return list(items.values())


def _check(item: Item) -> None:
    if item.task == "math":
        equations = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", item.answer)
        for a, op, b, c in equations:
            assert eval(f"{a}{op}{b}") == int(c), item
        assert item.answer.endswith(f"The answer is {equations[-1][3]}."), item
    elif item.task == "code":
        scope: dict[str, Callable[[object], object]] = {}
        exec(item.answer, scope)
        scope.pop("__builtins__")
        (function,) = scope.values()
        words = "in words" in item.answer or "text" in item.answer
        function("the quick brown fox jumps over lazy dogs" if words else [*range(-99, 100)])
    else:
        for value in json.loads(item.answer).values():
            assert str(value) in item.question, item


if __name__ == "__main__":
    generator = random.Random(0)
    for task_name in GENERATORS:
        drawn = [draw(generator, task_name, held_out=False) for _ in range(20000)]
        for one in drawn:
            _check(one)
        print(task_name, len({one.question for one in drawn}), "distinct of", len(drawn))
        for one in drawn[:6]:
            print(f"  {one.question}\n    {one.answer!r}")
