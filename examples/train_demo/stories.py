"""Stories about a number of things that grows, shrinks, is grouped or shared."""

from typing import Any

from examples.train_demo.arithmetic import LIMIT, factors
from examples.train_demo.sentences import GAIN, LOSS, PLACES, fill, solved, two_people
from examples.train_demo.words import Item, Person, Source

STORY_START = (
    "{name} has {n} {thing}.|{name} starts with {n} {thing}.|"
    "{name} owns {n} {thing}.|There are {n} {thing} in the {place}.|"
    "{name} has got {n} {thing}.|{name} has a collection of {n} {thing}.|"
    "At first {name} has {n} {thing}.|"
    "{name} has {n} {thing} in the {place}.|{name} keeps {n} {thing}.|"
    "In the morning {name} has {n} {thing}.|"
    "{name} brings {n} {thing}.|We know that {name} has {n} {thing}.|"
    "{n} {thing} belong to {name}.|"
    "{name} is the owner of {n} {thing}.|Today {name} has {n} {thing}.|"
    "{name} begins with {n} {thing}.|Let us say {name} has {n} {thing}.|"
    "{n} {thing} are in the {place}.|{name} holds {n} {thing}.|"
    "In the {place} there are {n} {thing}.|{name} counts {n} {thing}.|{name} buys {n} {thing}.|"
    "{name} finds {n} {thing} in the {place}.|{name} collects {n} {thing}."
)
STORY_END = (
    "How many {thing} does {she} have now?|"
    "How many {thing} does {name} have now?|"
    "How many {thing} are there now?|"
    "How many does {she} have in the end?|"
    "How many {thing} does {name} end up with?|How many does {name} have?|"
    "What number of {thing} does {name} have now?|"
    "How many {thing} has {name} now?|"
    "Now how many {thing} does {she} have?|"
    "How many {thing} are there in total?|"
    "Tell me how many {thing} {name} has now.|How many is that?|"
    "How many {thing} are there at the end?|How many {thing} is that?|"
    "What is the new number of {thing}?|How many {thing} does {name} have after that?|"
    "How many {thing} does {she} own now?|What is the total now?|"
    "So how many {thing} does {name} have?|How many {thing} are there after all this?|"
    "How many does {she} have now?|How many {thing} belong to {name} now?|"
    "How many {thing} has {she} got now?"
)
STORY_REST = (
    "|How many are left?|How many {thing} are left?|"
    "How many {thing} remain?|How many does {she} still have?|"
    "How many {thing} does {name} have left?|"
    "How many {thing} does {she} keep?|What is left?|"
    "How many are still there?|How many {thing} are still there?|How many does {she} have left?|"
    "How many {thing} does that leave?|What number of {thing} is left?"
)


def story(s: Source) -> Item:
    """Return a story of a number of things that grows and shrinks."""
    rng, (who, other), thing, past = s.rng, two_people(s), s.thing(), s.chance(0.35)
    events = rng.choice([1, 1, 2, 2, 3])
    now = start = rng.randint(2, LIMIT - 20 if s.chance(0.6) else 20)
    texts, steps = [], []
    values: dict[str, Any] = {
        "name": who.name,
        "she": who.she,
        "She": who.she.capitalize(),
        "her": who.her,
    }
    for i in range(events):
        gain = now < 3 or (now < LIMIT - 5 and s.chance(0.5))
        n = rng.randint(1, min(60, LIMIT - now) if gain else now - 1)
        subject = values
        if i == 0 and s.chance(0.5):
            subject = values | {"She": who.name, "she": who.name}
        elif i and s.chance(0.3):
            subject = values | {"She": rng.choice(["Then ", "Later ", "After that "]) + who.she}
        texts.append(
            fill(s, GAIN if gain else LOSS, past, n=n, other=other, thing=thing, **subject)
        )
        after = now + n if gain else now - n
        steps.append(f"{now}{'+' if gain else '-'}{n}={after} {thing}.")
        now, last_gain = after, gain
    if s.chance(0.2) and events < 3:
        return _if_story(s, who, thing, start, texts, steps, now)
    begin = fill(
        s, STORY_START, past, name=who.name, n=start, thing=thing, place=rng.choice(PLACES)
    )
    end = STORY_END
    if not last_gain:
        end += STORY_REST
    question = fill(s, end, False, thing=thing, **values)
    return solved(s, " ".join([begin, *texts, question]), steps, now)


STORY_IF = (
    "If {name} has {n} {thing} and {joined}, how many {thing} does {she} have?|"
    "If {name} has {n} {thing} and {joined}, how many are there then?|"
    "{name} has {n} {thing} and {joined}, how many {thing} now?|"
    "How many {thing} does {name} have if {she} starts with {n} and {joined}?|"
    "Suppose {name} has {n} {thing} and {joined}. How many is that?|"
    "Say {name} has {n} {thing} and {joined}, how many {thing} does that make?|"
    "When {name} has {n} {thing} and {joined}, what is the number of {thing} in the end?|"
    "How many {thing} are there if {name} has {n} {thing} and {joined}?|"
    "Given that {name} has {n} {thing} and {joined}, how many {thing} are there?|"
    "Imagine {name} has {n} {thing} and {joined}. How many {thing} does {she} have?|"
    "Assume {name} has {n} {thing} and {joined}. What is the number of {thing}?"
)


def _if_story(
    s: Source, who: Person, thing: str, start: int, texts: list[str], steps: list[str], now: int
) -> Item:
    """Return the same story in one sentence: if ..., how many?"""
    joined = " and ".join(
        t[0].lower() + t[1:-1] if t.split()[0] != who.name else t[:-1] for t in texts
    )
    for word in ("then ", "later ", "after that "):
        joined = joined.replace(" and " + word, " and then ")
    question = fill(
        s, STORY_IF, False, name=who.name, she=who.she, n=start, thing=thing, joined=joined
    )
    return solved(s, question, steps, now)


GROUPS = (
    "{name} has {a} {boxes} with {b} {thing} in each.|There are {a} {boxes} of {b} {thing}.|"
    "{name} has {a} {boxes} of {b} {thing} each.|"
    "There are {a} {boxes} and each {box} holds {b} {thing}.|"
    "Each {box} has {b} {thing}. {name} has {a} {boxes}.|"
    "{name} fills {a} {boxes} with {b} {thing} each.|"
    "A {box} holds {b} {thing}. {name} has {a} {boxes}.|"
    "{name} packs {b} {thing} into each of {a} {boxes}.|"
    "In every {box} there are {b} {thing}, and there are {a} {boxes}.|"
    "{a} {boxes} contain {b} {thing} each.|"
    "{name} puts {b} {thing} into each of the {a} {boxes}.|"
    "There are {b} {thing} in one {box}, and {name} owns {a} {boxes}.|"
    "{name} buys {a} {boxes} of {b} {thing} each.|"
    "There are {a} {boxes}. Every {box} has {b} {thing}.|"
    "{name} has {a} {boxes}, each with {b} {thing}.|"
    "With {b} {thing} per {box}, {name} has {a} {boxes}.|"
    "Every one of {a} {boxes} holds {b} {thing}.|"
    "{name} counts {a} {boxes} and {b} {thing} in each.|"
    "{name} owns {a} {boxes}; each {box} contains {b} {thing}."
)
GROUPS_ALL = (
    "How many {thing} are there?|How many {thing} are there in total?|"
    "How many {thing} does {name} have?|"
    "How many {thing} is that altogether?|"
    "What is the total number of {thing}?|How many {thing} in all?|"
    "How many {thing} do the {boxes} hold?|How many {thing} are in the {boxes} together?|"
    "What is the number of {thing}?|How many {thing} altogether?|How many {thing} does that make?|"
    "So how many {thing} are there?"
)
GROUPS_NOW = (
    "How many {thing} are there now?|"
    "How many {thing} does {name} have now?|How many {thing} is that now?|"
    "How many {thing} does {she} have in the end?|What is the number of {thing} now?|"
    "How many {thing} are there after that?|How many {thing} does {name} have after that?|"
    "So how many {thing} are there now?"
)


def groups(s: Source) -> Item:
    """Return a story of boxes of things, to which some are added or from which some are taken."""
    rng, who, thing, past = s.rng, s.person(), s.thing(), s.chance(0.25)
    a, b = factors(rng, LIMIT)
    boxes, box = rng.choice(
        [
            ("boxes", "box"),
            ("bags", "bag"),
            ("baskets", "basket"),
            ("rows", "row"),
            ("packs", "pack"),
            ("shelves", "shelf"),
            ("crates", "crate"),
            ("jars", "jar"),
            ("teams", "team"),
            ("trays", "tray"),
            ("rooms", "room"),
            ("groups", "group"),
        ]
    )
    values: dict[str, Any] = {
        "name": who.name,
        "she": who.she,
        "She": who.she.capitalize(),
        "thing": thing,
        "boxes": boxes,
        "box": box,
        "a": a,
        "b": b,
    }
    start = fill(s, GROUPS, past, **values)
    total = a * b
    steps = [f"{a}*{b}={total} {thing}."]
    kind = rng.choice(["all", "less", "more"])
    if kind == "all" or total < 3 or total > LIMIT - 2:
        end = fill(s, GROUPS_ALL, past=False, **values)
        return solved(s, f"{start} {end}", steps, total)
    c = rng.randint(1, min(60, total - 1 if kind == "less" else LIMIT - total))
    result = total - c if kind == "less" else total + c
    steps.append(f"{total}{'-' if kind == 'less' else '+'}{c}={result} {thing}.")
    event = fill(
        s, LOSS if kind == "less" else GAIN, past, n=c, other=s.name(), her=who.her, **values
    )
    end = fill(
        s,
        GROUPS_NOW
        + (
            "|How many {thing} are left?|How many are left?|How many {thing} remain?"
            if kind == "less"
            else ""
        ),
        past=False,
        **values,
    )
    return solved(s, f"{start} {event} {end}", steps, result)


SHARE_START = (
    "{name} has {n} {thing}.|There are {n} {thing}.|"
    "{name} owns {n} {thing}.|{name} bakes {n} {thing}.|"
    "{name} brings {n} {thing}.|"
    "{name} buys {n} {thing}.|{name} picks {n} {thing}.|{name} makes {n} {thing}.|"
    "{name} finds {n} {thing}.|A bag holds {n} {thing}."
)
SHARE = (
    "{She} shares all of them equally among {k} {friends}. How many {thing} does each get?|"
    "{She} divides them among {k} {friends}. How many does each one get?|"
    "How many {thing} go to each of {k} {friends}?|"
    "The {thing} are split evenly between {k} {friends}. How many does each have?|"
    "They are shared by {k} {friends}. How many {thing} are there for "
    "each?|{k} {friends} share them. How many does each get?|"
    "If {k} {friends} get the same number, how many {thing} does each get?|"
    "{She} puts the same number into {k} equal parts. How many {thing} are in each part?|"
    "{She} splits them equally among {k} {friends}. What does each receive?|"
    "{She} gives the same number to each of {k} {friends}. How many does each get?|"
    "Each of {k} {friends} gets the same number. How many is that?|"
    "{k} {friends} want an equal share. How many {thing} is that for each?|"
    "How many {thing} are there for each of {k} {friends}?|"
    "They go in equal parts to {k} {friends}. How many {thing} does each get?|"
    "{She} hands them out evenly to {k} {friends}. How many {thing} does each one get?|"
    "Divided fairly among {k} {friends}, how many does each get?"
)


def share(s: Source) -> Item:
    """Return a story of things that are shared equally, sometimes after more are found."""
    rng, who, thing, past = s.rng, s.person(), s.thing(), s.chance(0.3)
    k, q = factors(rng, LIMIT)
    total = k * q
    friends = rng.choice(
        "friends children neighbors students boxes bags plates people kids teams cousins".split()
    )
    values: dict[str, Any] = {
        "name": who.name,
        "she": who.she,
        "She": who.she.capitalize(),
        "thing": thing,
        "k": k,
        "friends": friends,
    }
    steps, start = [], total
    texts = []
    if s.chance(0.5) and total > 3:
        start = rng.randint(1, total - 1)
        more = total - start
        steps.append(f"{start}+{more}={total} {thing}.")
        texts.append(fill(s, GAIN, past, n=more, other=s.name(), her=who.her, **values))
    steps.append(f"{total}/{k}={q} {thing}.")
    begin = fill(s, SHARE_START, past, n=start, **values)
    end = fill(s, SHARE, False, **values)
    return solved(s, " ".join([begin, *texts, end]), steps, q)
