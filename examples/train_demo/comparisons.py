"""Two people compared, parts of a whole, and ages."""

from typing import Any

from examples.train_demo.arithmetic import LIMIT, factors
from examples.train_demo.sentences import fill, solved, two_people
from examples.train_demo.words import Item, Source

FIRST_HAS = (
    "{name} has {a} {thing}.|{name} owns {a} {thing}.|"
    "{name} has got {a} {thing}.|{a} {thing} belong to {name}.|"
    "{name} holds {a} {thing}.|{name} counts {a} {thing}.|{name} is the owner of {a} {thing}."
)
TIMES = (
    "{other} has {n} times as many.|"
    "{other} has {n} times as many {thing} as {name}.|"
    "{other} has {n} times more.|{other} owns {n} times that number.|"
    "{other} has {n} times the amount.|"
    "{other} has {n} times the number.|{other} has {n} times what {name} has."
)
MORE = (
    "{other} has {n} more.|{other} has {n} more {thing} than {name}.|"
    "{other} has {n} more than {name}.|{other} owns {n} more.|"
    "{other} has {n} {thing} more.|"
    "{other} has {n} more of them.|{other} has {n} {thing} more than {name}.|"
    "{name} has {n} fewer than {other}."
)
FEWER = (
    "{other} has {n} fewer.|{other} has {n} fewer {thing} than {name}.|"
    "{other} has {n} less.|{other} has {n} less than {name}.|"
    "{other} owns {n} fewer.|"
    "{other} has {n} {thing} less.|{name} has {n} more than {other}."
)
TWICE = (
    "{other} has twice as many.|{other} has double that.|"
    "{other} has twice as many {thing} as {name}.|"
    "{other} has double the number.|{other} owns twice as many.|"
    "{other} has two times as many.|{other} has twice that number.|{other} has the double."
)
OTHER_HAS = (
    "How many {thing} does {other} have?|How many does {other} have?|"
    "How many {thing} has {other}?|What does {other} have?|"
    "How many {thing} belong to {other}?|"
    "How many {thing} does {other} own?|What number of {thing} does {other} have?|"
    "So how many does {other} have?"
)
BOTH_HAVE = (
    "How many {thing} do they have together?|"
    "How many {thing} do they have in total?|How many do both have?|"
    "How many {thing} are there altogether?|"
    "How many {thing} do {name} and {other} have together?|"
    "How many is that in total?|What do they have together?|"
    "How many {thing} in all?|"
    "How many do they have together?|What is the total?|How many {thing} do the two have?|"
    "How many {thing} do both of them have?|How many {thing} is that together?|"
    "Altogether, how many {thing} do they have?"
)


def compare(s: Source) -> Item:
    """Return a problem of two people, one with more, fewer or N times as many things."""
    rng, (who, other), thing, past = s.rng, two_people(s), s.thing(), s.chance(0.3)
    kind, both = rng.choice(["times", "more", "fewer"]), s.chance(0.6)
    while True:
        a, n = rng.randint(1, 50), rng.randint(1, 40)
        if kind == "times":
            a, n = factors(rng, LIMIT)
        b = {"times": a * n, "more": a + n, "fewer": a - n}[kind]
        if b > 0 and n > 1 and a + b <= LIMIT:
            break
    values: dict[str, Any] = {"name": who.name, "other": other, "thing": thing, "a": a, "n": n}
    if kind == "times" and n == 2 and s.chance(0.7):
        values["n"] = "two"
    first = fill(s, FIRST_HAS, past, **values)
    relation = {"times": TIMES, "more": MORE, "fewer": FEWER}[kind]
    if kind == "times" and n == 2 and values["n"] == "two":
        relation = TWICE
    second = fill(s, relation, past, **values)
    sign = {"times": "*", "more": "+", "fewer": "-"}[kind]
    steps = [f"{other} has {a}{sign}{n}={b} {thing}."]
    if not both:
        end = fill(s, OTHER_HAS, False, **values)
        return solved(s, f"{first} {second} {end}", steps, b)
    steps.append(f"Together {a}+{b}={a + b} {thing}.")
    end = fill(s, BOTH_HAVE, False, **values)
    return solved(s, f"{first} {second} {end}", steps, a + b)


OF_WHOLE = (
    "Of {whole} {thing}, {part} are {red}.|"
    "{name} has {whole} {thing}. {part} of them are {red}.|"
    "There are {whole} {thing} and {part} are {red}.|"
    "{part} of the {whole} {thing} are {red}.|"
    "Out of {whole} {thing}, {part} are {red}.|"
    "Among {whole} {thing}, {part} are {red}.|"
    "{name} owns {whole} {thing}, and {part} of those are {red}.|"
    "We have {whole} {thing}. {part} are {red}."
)
NOT_OF_KIND = (
    "How many are not {red}?|How many {thing} are not {red}?|"
    "How many others are there?|How many of the {thing} are not {red}?|"
    "How many are something else?|What is the number of {thing} that are not {red}?|"
    "So how many are not {red}?"
)
PARTS = (
    "{name} has {text}.|There are {text}.|{name} buys {text}.|"
    "{name} sees {text}.|In a bag there are {text}.|{name} counts {text}.|"
    "{name} brings {text}.|{name} finds {text}.|On the table there are {text}.|"
    "{name} sells {text}.|{name} picks {text}."
)
PARTS_TOTAL = (
    "How many {what} is that?|How many {what} are there in total?|"
    "How many {what} does {name} have altogether?|"
    "How many {what} are there?|How many is that in total?|"
    "What is the total?|"
    "How many {what} altogether?|How many {what} in all?|What is the total number of {what}?|"
    "How many {what} does that make?"
)


def parts(s: Source) -> Item:
    """Return a problem of kinds that make a whole, or of a whole without one kind."""
    rng, who, thing, past = s.rng, s.person(), s.thing(), s.chance(0.3)
    colors = rng.sample(
        "red blue green yellow black white big small old new broken wooden".split(), 3
    )
    count = rng.choice([2, 2, 3])
    numbers = [rng.randint(1, LIMIT // 3) for _ in range(count)]
    values: dict[str, Any] = {"name": who.name, "she": who.she, "thing": thing}
    if s.chance(0.35):
        whole, part = sum(numbers), numbers[0]
        values |= {"whole": whole, "part": part, "red": colors[0]}
        question = fill(s, OF_WHOLE, past, **values) + " " + fill(s, NOT_OF_KIND, False, **values)
        return solved(s, question, [f"{whole}-{part}={whole - part} {thing}."], whole - part)
    listed = [f"{n} {c}" for n, c in zip(numbers, colors, strict=False)]
    if s.chance(0.4):
        others = [thing] + [s.thing() for _ in range(count - 1)]
        listed = [f"{n} {o}" for n, o in zip(numbers, others, strict=False)]
        what = "things"
    else:
        listed[-1] += f" {thing}"
        what = thing
    text = ", ".join(listed[:-1]) + " and " + listed[-1]
    values |= {"text": text, "what": what}
    question = fill(s, PARTS, past, **values) + " " + fill(s, PARTS_TOTAL, False, **values)
    total, steps = numbers[0], []
    for n in numbers[1:]:
        steps.append(f"{total}+{n}={total + n} {what}.")
        total += n
    return solved(s, question, steps, total)


AGE = (
    "{name} is {a} years old.|{name} is {a}.|{name} is now {a} years old.|"
    "The age of {name} is {a}.|{name} just turned {a}.|Today {name} is {a} years old.|"
    "{name} is {a} years of age."
)
AGE_LATER = (
    "How old will {she} be in {n} years?|How old is {name} in {n} years?|"
    "What will be the age of {name} in {n} years?|"
    "How old will {name} be in {n} years?|In {n} years, how old is {name}?|"
    "What age will {she} have in {n} years?|{n} years from now, how old will {name} be?"
)
AGE_BEFORE = (
    "How old was {she} {n} years ago?|How old was {name} {n} years ago?|"
    "What was the age of {name} {n} years ago?|"
    "{n} years ago, how old was {name}?|What age was {name} {n} years ago?"
)
OLDER = (
    "{other} is {n} years older.|{other} is {n} years older than {name}.|"
    "{other} is older by {n} years.|"
    "{name} is {n} years younger than {other}.|"
    "{other} was born {n} years before {name}.|{name} was born {n} years after {other}."
)
YOUNGER = (
    "{other} is {n} years younger.|"
    "{other} is {n} years younger than {name}.|"
    "{other} is younger by {n} years.|"
    "{name} is {n} years older than {other}.|"
    "{other} was born {n} years after {name}.|{name} was born {n} years before {other}."
)
AGES_TOGETHER = (
    "How old are they together?|What is the sum of their ages?|"
    "How old are both together?|What do their ages add up to?|"
    "What are their ages together?|How many years are they together?|"
    "What is the total of their ages?"
)


def age(s: Source) -> Item:
    """Return a problem about how old somebody is, was or will be."""
    rng, (who, other) = s.rng, two_people(s)
    a, n = rng.randint(3, 60), rng.randint(1, 35)
    older = a <= n or s.chance(0.5)
    values: dict[str, Any] = {"name": who.name, "other": other, "a": a, "n": n, "she": who.she}
    first = fill(s, AGE, False, **values)
    b = a + n if older else a - n
    kind = rng.choice(["other", "future", "both"])
    if kind == "future":
        end = fill(s, AGE_LATER if older else AGE_BEFORE, False, **values)
        return solved(s, f"{first} {end}", [f"{a}{'+' if older else '-'}{n}={b} years."], b)
    second = fill(s, OLDER if older else YOUNGER, False, **values)
    steps = [f"{other} is {a}{'+' if older else '-'}{n}={b} years."]
    if kind == "other":
        end = fill(
            s,
            "How old is {other}?|What is the age of {other}?|What age is {other}?",
            False,
            **values,
        )
        return solved(s, f"{first} {second} {end}", steps, b)
    end = fill(s, AGES_TOGETHER, False, **values)
    return solved(s, f"{first} {second} {end}", [*steps, f"Together {a}+{b}={a + b} years."], a + b)
