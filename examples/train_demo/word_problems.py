"""Word problems in one to three steps, every step an equation with its unit.

Stories are put together from sentences that can each be said in many ways, in the present or the
past tense.
"""

import re
from collections.abc import Callable
from typing import Any

from examples.train_demo.arithmetic import LIMIT, factors
from examples.train_demo.words import Item, Person, Source

PLACES = "shelf table floor desk truck garden room box bag basket drawer kitchen".split()
GAIN = (
    "{other} gives {her} {n} more.|{She} buys {n} more.|"
    "{She} finds {n} {thing}.|{She} gets {n} more from {other}.|"
    "Then {other} sends {her} another {n} {thing}.|{She} makes {n} more.|"
    "{She} collects {n} more {thing}.|"
    "{other} hands {her} {n} {thing}.|Later {she} wins {n} {thing}.|{She} picks up {n} others.|"
    "Then {n} more {thing} are added.|"
    "{She} receives {n} {thing} as a present.|{n} more come from {other}.|"
    "After that {she} adds {n} {thing}.|"
    "{She} borrows {n} {thing} from {other}.|{She} earns {n} more."
).split("|")
LOSS = (
    "{She} gives {n} to {other}.|{She} loses {n}.|{She} sells {n} of them.|"
    "{other} takes {n} {thing}.|"
    "Then {n} {thing} break.|{She} throws {n} away.|"
    "{She} uses {n} {thing}.|{She} gives away {n} {thing}.|"
    "{n} of them get lost.|{She} drops {n} of the {thing}.|{She} hands {n} of them to {other}.|"
    "Then {she} eats {n}.|{other} borrows {n} of them.|"
    "{She} donates {n} {thing}.|{other} steals {n}.|"
    "{She} lets {other} have {n} {thing}.|Later {n} are stolen."
).split("|")
PAST = {
    "gives": "gave",
    "buys": "bought",
    "finds": "found",
    "gets": "got",
    "sends": "sent",
    "makes": "made",
    "collects": "collected",
    "hands": "handed",
    "wins": "won",
    "picks": "picked",
    "are": "were",
    "receives": "received",
    "come": "came",
    "adds": "added",
    "borrows": "borrowed",
    "earns": "earned",
    "loses": "lost",
    "sells": "sold",
    "takes": "took",
    "break": "broke",
    "throws": "threw",
    "uses": "used",
    "get": "got",
    "drops": "dropped",
    "eats": "ate",
    "donates": "donated",
    "steals": "stole",
    "lets": "let",
    "has": "had",
    "is": "was",
    "costs": "cost",
    "cost": "cost",
    "pays": "paid",
    "reads": "read",
    "does": "did",
}


def tense(text: str, past: bool) -> str:
    """`text` in the past, if wanted; a question keeps its infinitive after do, does and did."""
    if not past:
        return text
    return re.sub(r"[A-Za-z]+", lambda m: PAST.get(m[0], m[0]), text)


def _fill(s: Source, options: str | list[str], past: bool, **values: object) -> str:
    """A phrasing with its values; its verbs change tense before names come in."""
    text = tense(s.phrase(options), past)
    text = agree(text.format(**values))
    return text[0].upper() + text[1:]


def agree(text: str) -> str:
    """I have and we have, instead of has."""

    def base(match: re.Match[str]) -> str:
        subject, verb = match[1], match[2]
        plain = {"has": "have", "does": "do", "is": "are", "goes": "go", "was": "were"}.get(verb)
        if plain is None:
            plain = verb[:-1] if verb.endswith("s") and verb not in ("is", "was") else verb
        if subject == "I" and verb in ("is", "was"):
            plain = {"is": "am", "was": "was"}[verb]
        return f"{subject} {plain}"

    text = re.sub(r"\b(I|[Ww]e) ([a-z]+)\b", base, text)
    for verb, plain in (("does", "do"), ("has", "have")):
        text = re.sub(rf"\b{verb} (I|we)\b", rf"{plain} \1", text)
    text = re.sub(r"\b(is|are) I\b", "am I", text)
    return re.sub(r"\bis we\b", "are we", text)


def _item(s: Source, question: str, steps: list[str], result: int) -> Item:
    return s.item("math", question, " ".join(steps) + f" The answer is {result}.")


def _people(s: Source) -> tuple[Person, str]:
    return s.person(), s.name()


def _story(s: Source) -> Item:
    """A number of things that grows and shrinks."""
    rng, (who, other), thing, past = s.rng, _people(s), s.thing(), s.chance(0.35)
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
            _fill(s, GAIN if gain else LOSS, past, n=n, other=other, thing=thing, **subject)
        )
        after = now + n if gain else now - n
        steps.append(f"{now}{'+' if gain else '-'}{n}={after} {thing}.")
        now, last_gain = after, gain
    if s.chance(0.2) and events < 3:
        return _if_story(s, who, thing, start, texts, steps, now)
    begin = _fill(
        s,
        "{name} has {n} {thing}.|{name} starts with {n} {thing}.|"
        "{name} owns {n} {thing}.|There are {n} {thing} in the {place}.|"
        "{name} has got {n} {thing}.|{name} has a collection of {n} {thing}.|"
        "At first {name} has {n} {thing}.|"
        "{name} has {n} {thing} in the {place}.|{name} keeps {n} {thing}.|"
        "In the morning {name} has {n} {thing}.|"
        "{name} brings {n} {thing}.|We know that {name} has {n} {thing}.|"
        "{n} {thing} belong to {name}.",
        past,
        name=who.name,
        n=start,
        thing=thing,
        place=rng.choice(PLACES),
    )
    end = (
        "How many {thing} does {she} have now?|"
        "How many {thing} does {name} have now?|"
        "How many {thing} are there now?|"
        "How many does {she} have in the end?|"
        "How many {thing} does {name} end up with?|How many does {name} have?|"
        "What number of {thing} does {name} have now?|"
        "How many {thing} has {name} now?|"
        "Now how many {thing} does {she} have?|"
        "How many {thing} are there in total?|"
        "Tell me how many {thing} {name} has now.|How many is that?"
    )
    if not last_gain:
        end += (
            "|How many are left?|How many {thing} are left?|"
            "How many {thing} remain?|How many does {she} still have?|"
            "How many {thing} does {name} have left?|"
            "How many {thing} does {she} keep?|What is left?"
        )
    question = _fill(s, end, False, thing=thing, **values)
    return _item(s, " ".join([begin, *texts, question]), steps, now)


def _if_story(
    s: Source, who: Person, thing: str, start: int, texts: list[str], steps: list[str], now: int
) -> Item:
    """The same story in one sentence: if ..., how many?"""
    joined = " and ".join(
        t[0].lower() + t[1:-1] if t.split()[0] != who.name else t[:-1] for t in texts
    )
    for word in ("then ", "later ", "after that "):
        joined = joined.replace(" and " + word, " and then ")
    question = _fill(
        s,
        "If {name} has {n} {thing} and {joined}, how many {thing} does {she} have?|"
        "If {name} has {n} {thing} and {joined}, how many are there then?|"
        "{name} has {n} {thing} and {joined}, how many {thing} now?|"
        "How many {thing} does {name} have if {she} starts with {n} and {joined}?|"
        "Suppose {name} has {n} {thing} and {joined}. How many is that?|"
        "Say {name} has {n} {thing} and {joined}, how many {thing} does that make?|"
        "When {name} has {n} {thing} and {joined}, what is the number of {thing} in the end?",
        False,
        name=who.name,
        she=who.she,
        n=start,
        thing=thing,
        joined=joined,
    )
    return _item(s, question, steps, now)


def _groups(s: Source) -> Item:
    """Boxes of things, and what is added or taken."""
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
    start = _fill(
        s,
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
        "There are {b} {thing} in one {box}, and {name} owns {a} {boxes}.",
        past,
        **values,
    )
    total = a * b
    steps = [f"{a}*{b}={total} {thing}."]
    kind = rng.choice(["all", "less", "more"])
    if kind == "all" or total < 3 or total > LIMIT - 2:
        end = _fill(
            s,
            "How many {thing} are there?|How many {thing} are there in total?|"
            "How many {thing} does {name} have?|"
            "How many {thing} is that altogether?|"
            "What is the total number of {thing}?|How many {thing} in all?",
            past=False,
            **values,
        )
        return _item(s, f"{start} {end}", steps, total)
    c = rng.randint(1, min(60, total - 1 if kind == "less" else LIMIT - total))
    result = total - c if kind == "less" else total + c
    steps.append(f"{total}{'-' if kind == 'less' else '+'}{c}={result} {thing}.")
    event = _fill(
        s, LOSS if kind == "less" else GAIN, past, n=c, other=s.name(), her=who.her, **values
    )
    end = _fill(
        s,
        "How many {thing} are there now?|"
        "How many {thing} does {name} have now?|How many {thing} is that now?|"
        "How many {thing} does {she} have in the end?|What is the number of {thing} now?"
        + (
            "|How many {thing} are left?|How many are left?|How many {thing} remain?"
            if kind == "less"
            else ""
        ),
        past=False,
        **values,
    )
    return _item(s, f"{start} {event} {end}", steps, result)


def _shop(s: Source) -> Item:
    """One or two purchases, with or without change."""
    rng, who, past = s.rng, s.person(), s.chance(0.35)
    one, money_word = s.thing(), rng.choice(["dollars"] * 4 + ["euros", "coins", "cents", "pounds"])
    values: dict[str, Any] = {
        "name": who.name,
        "she": who.she,
        "She": who.she.capitalize(),
        "coins": money_word,
        "x": one,
    }
    a, b = factors(rng, 90)
    values |= {"a": a, "b": b}
    kind = rng.choice(["one", "two", "two", "change", "change"])
    steps = [f"The {one} cost {a}*{b}={a * b} {money_word}."]
    if kind == "two":
        two = s.thing()
        while True:
            c, d = factors(rng, 90)
            if a * b + c * d <= LIMIT:
                break
        total = a * b + c * d
        buys = _fill(
            s,
            "{name} buys {a} {x} for {b} {coins} each and {c} {y} for {d} {coins} each.|"
            "{name} buys {a} {x} at {b} {coins} each and {c} {y} at {d} {coins} each.|"
            "{name} buys {a} {x} and {c} {y}. The {x} cost {b} {coins} each, the "
            "{y} {d} {coins} each.|"
            "One of the {x} costs {b} {coins}, one of the {y} {d} {coins}. {name} "
            "buys {a} {x} and {c} {y}.|"
            "{name} gets {a} {x} for {b} {coins} apiece and {c} {y} for {d} {coins} apiece.|"
            "In a shop {name} takes {a} {x}, each for {b} {coins}, and {c} {y}, "
            "each for {d} {coins}.|"
            "{name} pays {b} {coins} for each of {a} {x} and {d} {coins} for each of {c} {y}.|"
            "The {x} are {b} {coins} each and the {y} are {d} {coins} each. {name} "
            "buys {a} {x} and {c} {y}.",
            past,
            y=two,
            c=c,
            d=d,
            **values,
        )
        steps += [
            f"The {two} cost {c}*{d}={c * d} {money_word}.",
            f"Together {a * b}+{c * d}={total} {money_word}.",
        ]
    else:
        total = a * b
        money = rng.randint(total + 1, LIMIT) if kind == "change" else 0
        budget = (
            "{name} has {money} {coins} and buys {a} {x} for {b} {coins} each.|"
            "{name} buys {a} {x} at {b} {coins} each and pays with {money} "
            "{coins}.|"
            "With {money} {coins} {name} buys {a} {x} that cost {b} {coins} each.|"
            "{name} has {money} {coins}. {She} buys {a} {x} for {b} {coins} each.|"
            "{name} goes to the market with {money} {coins} and buys {a} {x}. Each "
            "costs {b} {coins}.|"
            "{name} takes {money} {coins} to the shop. {She} buys {a} {x} for {b} {coins} apiece.|"
            "The {x} cost {b} {coins} each. {name} buys {a} of them and has {money} {coins}."
        )
        plain = (
            "{name} buys {a} {x} for {b} {coins} each.|"
            "{name} buys {a} {x}. Each costs {b} {coins}.|"
            "One of the {x} costs {b} {coins}. {name} buys {a} of them.|"
            "{name} buys {a} {x} at {b} {coins} each.|"
            "The {x} cost {b} {coins} each and {name} buys {a}.|"
            "{name} pays {b} {coins} for each of {a} {x}.|"
            "{name} orders {a} {x} at a price of {b} {coins} each.|"
            "{name} wants {a} {x} and each is {b} {coins}.|"
            "A shop sells {x} for {b} {coins} each. {name} takes {a}."
        )
        buys = _fill(s, budget if money else plain, past, money=money, **values)
        if money:
            steps.append(f"{money}-{total}={money - total} {money_word}.")
            end = _fill(
                s,
                "How much money is left?|How many {coins} does {she} have left?|"
                "How much is left?|How much change does {she} get?|"
                "How many {coins} are left?|What is the change?|"
                "How much money does {name} have left?|How many {coins} remain?|"
                "How many {coins} does {name} keep?|How much does {she} get back?",
                False,
                **values,
            )
            return _item(s, f"{buys} {end}", steps, money - total)
    end = _fill(
        s,
        "How much does {she} pay?|How much does {name} pay?|"
        "How many {coins} does {she} spend?|How much does it cost?|"
        "How much is that in total?|What does {name} pay in total?|"
        "What is the total price?|How much does {name} spend?|"
        "How many {coins} does {name} need?|What is the bill?|"
        "How expensive is that?|How much money does {she} need?",
        False,
        **values,
    )
    return _item(s, f"{buys} {end}", steps, total)


def _share(s: Source) -> Item:
    """Things dealt out equally, sometimes after more are found."""
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
        texts.append(_fill(s, GAIN, past, n=more, other=s.name(), her=who.her, **values))
    steps.append(f"{total}/{k}={q} {thing}.")
    begin = _fill(
        s,
        "{name} has {n} {thing}.|There are {n} {thing}.|"
        "{name} owns {n} {thing}.|{name} bakes {n} {thing}.|"
        "{name} brings {n} {thing}.",
        past,
        n=start,
        **values,
    )
    end = _fill(
        s,
        "{She} shares all of them equally among {k} {friends}. How many {thing} does each get?|"
        "{She} divides them among {k} {friends}. How many does each one get?|"
        "How many {thing} go to each of {k} {friends}?|"
        "The {thing} are split evenly between {k} {friends}. How many does each have?|"
        "They are shared by {k} {friends}. How many {thing} are there for "
        "each?|{k} {friends} share them. How many does each get?|"
        "If {k} {friends} get the same number, how many {thing} does each get?|"
        "{She} puts the same number into {k} equal parts. How many {thing} are in each part?|"
        "{She} splits them equally among {k} {friends}. What does each receive?",
        False,
        **values,
    )
    return _item(s, " ".join([begin, *texts, end]), steps, q)


def _compare(s: Source) -> Item:
    """Two people, one with more, fewer or times as many."""
    rng, (who, other), thing, past = s.rng, _people(s), s.thing(), s.chance(0.3)
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
    first = _fill(
        s,
        "{name} has {a} {thing}.|{name} owns {a} {thing}.|"
        "{name} has got {a} {thing}.|{a} {thing} belong to {name}.",
        past,
        **values,
    )
    relation = {
        "times": "{other} has {n} times as many.|"
        "{other} has {n} times as many {thing} as {name}.|"
        "{other} has {n} times more.|{other} owns {n} times that number.|"
        "{other} has {n} times the amount.",
        "more": "{other} has {n} more.|{other} has {n} more {thing} than {name}.|"
        "{other} has {n} more than {name}.|{other} owns {n} more.|"
        "{other} has {n} {thing} more.",
        "fewer": "{other} has {n} fewer.|{other} has {n} fewer {thing} than {name}.|"
        "{other} has {n} less.|{other} has {n} less than {name}.|"
        "{other} owns {n} fewer.",
    }[kind]
    if kind == "times" and n == 2 and values["n"] == "two":
        relation = (
            "{other} has twice as many.|{other} has double that.|"
            "{other} has twice as many {thing} as {name}.|"
            "{other} has double the number.|{other} owns twice as many."
        )
    second = _fill(s, relation, past, **values)
    sign = {"times": "*", "more": "+", "fewer": "-"}[kind]
    steps = [f"{other} has {a}{sign}{n}={b} {thing}."]
    if not both:
        end = _fill(
            s,
            "How many {thing} does {other} have?|How many does {other} have?|"
            "How many {thing} has {other}?|What does {other} have?|"
            "How many {thing} belong to {other}?",
            False,
            **values,
        )
        return _item(s, f"{first} {second} {end}", steps, b)
    steps.append(f"Together {a}+{b}={a + b} {thing}.")
    end = _fill(
        s,
        "How many {thing} do they have together?|"
        "How many {thing} do they have in total?|How many do both have?|"
        "How many {thing} are there altogether?|"
        "How many {thing} do {name} and {other} have together?|"
        "How many is that in total?|What do they have together?|"
        "How many {thing} in all?",
        False,
        **values,
    )
    return _item(s, f"{first} {second} {end}", steps, a + b)


def _parts(s: Source) -> Item:
    """Two or three kinds make a whole, or what is not of a kind."""
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
        question = (
            _fill(
                s,
                "Of {whole} {thing}, {part} are {red}.|"
                "{name} has {whole} {thing}. {part} of them are {red}.|"
                "There are {whole} {thing} and {part} are {red}.|"
                "{part} of the {whole} {thing} are {red}.|"
                "Out of {whole} {thing}, {part} are {red}.",
                past,
                **values,
            )
            + " "
            + _fill(
                s,
                "How many are not {red}?|How many {thing} are not {red}?|"
                "How many others are there?|How many of the {thing} are not {red}?",
                False,
                **values,
            )
        )
        return _item(s, question, [f"{whole}-{part}={whole - part} {thing}."], whole - part)
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
    question = (
        _fill(
            s,
            "{name} has {text}.|There are {text}.|{name} buys {text}.|"
            "{name} sees {text}.|In a bag there are {text}.|{name} counts {text}.",
            past,
            **values,
        )
        + " "
        + _fill(
            s,
            "How many {what} is that?|How many {what} are there in total?|"
            "How many {what} does {name} have altogether?|"
            "How many {what} are there?|How many is that in total?|"
            "What is the total?",
            False,
            **values,
        )
    )
    total, steps = numbers[0], []
    for n in numbers[1:]:
        steps.append(f"{total}+{n}={total + n} {what}.")
        total += n
    return _item(s, question, steps, total)


def _rate(s: Source) -> Item:
    """So much an hour or a day, for one or two stretches, or towards a goal."""
    rng, who, past = s.rng, s.person(), False
    if s.chance(0.55):
        verb, unit, hour = (
            rng.choice(["run", "walk", "ride", "swim", "drive", "row", "fly", "hike"]),
            rng.choice(["kilometers", "miles"]),
            "hour",
        )
    else:
        verb, unit, hour = (
            rng.choice(
                [
                    "read",
                    "write",
                    "solve",
                    "make",
                    "bake",
                    "sell",
                    "paint",
                    "plant",
                    "fold",
                    "collect",
                ]
            ),
            s.thing(),
            rng.choice(["day", "week", "hour", "minute"]),
        )
        if verb == "read":
            unit = rng.choice(["pages", "books"])
    a, b = factors(rng, 90)
    hours = hour + "s" if b != 1 else hour
    values: dict[str, Any] = {
        "name": who.name,
        "she": who.she,
        "She": who.she.capitalize(),
        "verb": verb,
        "unit": unit,
        "hour": hour,
        "hours": hours,
        "a": a,
        "b": b,
    }
    first = _fill(
        s,
        "{name} can {verb} {a} {unit} per {hour} for {b} {hours}.|"
        "{name} {verb}s {a} {unit} per {hour} for {b} {hours}.|"
        "{name} {verb}s {a} {unit} every {hour} for {b} {hours}.|"
        "Every {hour} {name} {verb}s {a} {unit}. {She} does so for {b} "
        "{hours}.|"
        "For {b} {hours} {name} {verb}s {a} {unit} each {hour}.|"
        "{name} {verb}s {a} {unit} in one {hour} and keeps on for {b} {hours}.|"
        "{name} {verb}s for {b} {hours}, {a} {unit} per {hour}.|"
        "{name} {verb}s {a} {unit} a {hour} for {b} {hours}.",
        past,
        **values,
    )
    total = a * b
    steps = [f"{a}*{b}={total} {unit}."]
    kind = rng.choice(["one", "goal", "two"])
    if kind == "goal":
        goal = rng.randint(total + 1, LIMIT)
        steps.append(f"{goal}-{total}={goal - total} {unit}.")
        question = (
            first
            + " "
            + _fill(
                s,
                "{She} wants to {verb} {goal} {unit}. How many are left?|"
                "The goal is {goal} {unit}. How many {unit} remain?|"
                "How many of {goal} {unit} are left then?|"
                "How many more {unit} must {she} {verb} to reach {goal}?|"
                "{She} needs {goal} {unit} in all. How many {unit} are missing?",
                past,
                goal=goal,
                **values,
            )
        )
        return _item(s, question, steps, goal - total)
    if kind == "one":
        end = _fill(
            s,
            "How many {unit} is that?|How many {unit} does {she} {verb}?|"
            "How many {unit} does {name} {verb} in total?|How many {unit} in all?|"
            "How far is that?"
            if "miles kilometers".find(unit) >= 0
            else "How many {unit} is that?|How many {unit} does {she} {verb}?|"
            "How many {unit} does {name} {verb} in total?|How many {unit} in all?",
            past,
            **values,
        )
        return _item(s, f"{first} {end}", steps, total)
    while True:
        c, d = factors(rng, 90)
        if total + c * d <= LIMIT:
            break
    values |= {"c": c, "d": d, "both": b + d}
    result = total + c * d
    second = _fill(
        s,
        "After that, {she} {verb}s {c} {unit} per {hour}.|"
        "Then {she} {verb}s {c} {unit} per {hour}.|"
        "Later {she} {verb}s {c} {unit} every {hour}.|"
        "From then on {she} {verb}s {c} {unit} a {hour}.",
        past,
        **values,
    )
    if s.chance(0.5):
        end = _fill(
            s,
            "How many {unit} can {she} {verb} in {both} {hours}?|"
            "How many {unit} does {name} {verb} in {both} {hours}?|"
            "How many {unit} is that after {both} {hours}?",
            past,
            **values,
        )
        steps = [
            f"First {total_text(a, b)} {unit}.",
            f"Left {b + d}-{b}={d} {hours}.",
            f"Then {c}*{d}={c * d} {unit}.",
        ]
    else:
        second = _fill(
            s,
            "Then {she} {verb}s {c} {unit} per {hour} for {d} {hours}.|"
            "After that {she} {verb}s {c} {unit} per {hour} for {d} {hours}.|"
            "For another {d} {hours} {she} {verb}s {c} {unit} each {hour}.",
            past,
            **values,
        )
        end = _fill(
            s,
            "How many {unit} is that in total?|"
            "How many {unit} does {she} {verb} in total?|"
            "How many {unit} altogether?|How many {unit} in all?",
            past,
            **values,
        )
        steps = [f"First {total_text(a, b)} {unit}.", f"Then {c}*{d}={c * d} {unit}."]
    steps.append(f"Together {total}+{c * d}={result} {unit}.")
    return _item(s, f"{first} {second} {end}", steps, result)


def total_text(a: int, b: int) -> str:
    return f"{a}*{b}={a * b}"


def _age(s: Source) -> Item:
    """How old somebody is, was or will be."""
    rng, (who, other) = s.rng, _people(s)
    a, n = rng.randint(3, 60), rng.randint(1, 35)
    older = a <= n or s.chance(0.5)
    values: dict[str, Any] = {"name": who.name, "other": other, "a": a, "n": n, "she": who.she}
    first = _fill(
        s,
        "{name} is {a} years old.|{name} is {a}.|{name} is now {a} years old.|"
        "The age of {name} is {a}.",
        False,
        **values,
    )
    b = a + n if older else a - n
    kind = rng.choice(["other", "future", "both"])
    if kind == "future":
        end = _fill(
            s,
            "How old will {she} be in {n} years?|How old is {name} in {n} years?|"
            "What will be the age of {name} in {n} years?"
            if older
            else "How old was {she} {n} years ago?|How old was {name} {n} years ago?|"
            "What was the age of {name} {n} years ago?",
            False,
            **values,
        )
        return _item(s, f"{first} {end}", [f"{a}{'+' if older else '-'}{n}={b} years."], b)
    second = _fill(
        s,
        "{other} is {n} years older.|{other} is {n} years older than {name}.|"
        "{other} is older by {n} years.|"
        "{name} is {n} years younger than {other}."
        if older
        else "{other} is {n} years younger.|"
        "{other} is {n} years younger than {name}.|"
        "{other} is younger by {n} years.|"
        "{name} is {n} years older than {other}.",
        False,
        **values,
    )
    steps = [f"{other} is {a}{'+' if older else '-'}{n}={b} years."]
    if kind == "other":
        end = _fill(
            s,
            "How old is {other}?|What is the age of {other}?|What age is {other}?",
            False,
            **values,
        )
        return _item(s, f"{first} {second} {end}", steps, b)
    end = _fill(
        s,
        "How old are they together?|What is the sum of their ages?|"
        "How old are both together?|What do their ages add up to?",
        False,
        **values,
    )
    return _item(s, f"{first} {second} {end}", [*steps, f"Together {a}+{b}={a + b} years."], a + b)


SHORT = {
    "*": (
        "Each {x} has {a} {y}. How many {y} do {b} {x}s have?|"
        "A {x} costs {a} dollars. What do {b} {x}s cost?|"
        "One {x} holds {a} {y}. How many {y} fit into {b} {x}s?|"
        "We need {a} {y} for every {x}. How many {y} do we need for {b} {x}s?|"
        "{b} {x}s with {a} {y} each: how many {y} are there?|"
        "A {x} uses {a} {y} a day. How many {y} does it use in {b} days?|"
        "There are {b} tables with {a} {y} on each. How many {y} are on the "
        "tables?|{b} workers carry {a} {y} each. How many {y} do they carry?|"
        "Every day {a} {y} arrive. How many {y} arrive in {b} days?|"
        "A pack of {x} contains {a} {y}. You buy {b} packs. How many {y} do "
        "you get?|{a} {y} a week for {b} weeks, how many {y} is that?|"
        "It takes {a} minutes to paint one {x}. How many minutes do {b} {x}s "
        "take?|"
        "A room has {b} rows of {a} {y}. How many {y} are in the room?|"
        "A ticket is {a} dollars. How much do {b} tickets cost?|"
        "{b} kids have {a} {y} each, how many {y} do they have?|"
        "The price of a {x} is {a} dollars. I take {b}. What do I pay?"
    ),
    "/": (
        "{c} {y} are put into {b} {x}s equally. How many {y} are in each {x}?|"
        "{b} people share {c} {y}. How many {y} does each person get?|"
        "A rope of {c} meters is cut into {b} equal parts. How many meters is "
        "each part?|"
        "{c} {y} are divided by {b} children. How many {y} does each child "
        "have?|{b} {x}s cost {c} dollars. How much is one {x}?|"
        "How many groups of {b} can {c} {y} form?|"
        "There are {c} {y} in {b} equal rows. How many {y} are in a row?|"
        "If {b} {x}s weigh {c} kilos, how heavy is one {x}?|"
        "Somebody packs {c} {y}, {b} to a {x}. How many {x}s are needed?|"
        "We have {c} {y} for {b} days. How many {y} can we use a day?|"
        "{c} students make {b} teams of the same size. How many students are "
        "in a team?|"
        "A trip of {c} miles takes {b} hours. How many miles is that per hour?|"
        "Share {c} {y} fairly between {b} friends. How many does each get?|"
        "Each {x} takes {b} {y}. How many {x}s can be filled with {c} {y}?"
    ),
    "+": (
        "{p} {y} are on the table and {q} on the floor. How many {y} are "
        "there?|"
        "A shop sold {p} {y} today and {q} yesterday. How many {y} did it "
        "sell?|There are {p} boys and {q} girls. How many children are there?|"
        "{p} {y} were here, then {q} more came. How many {y} are here now?|"
        "One {x} has {p} {y}, another has {q}. How many {y} do both have?|"
        "The first bag holds {p} {y}, the second {q}. How many {y} is that in "
        "total?|"
        "On one day I saw {p} {y} and on the next day {q}. How many {y} did I "
        "see?|"
        "A {x} costs {p} dollars and a hat {q} dollars. What do they cost "
        "together?|"
        "It was {p} degrees and got {q} degrees warmer. How many degrees is it "
        "now?|"
        "We drove {p} miles in the morning and {q} miles in the evening. How "
        "many miles did we drive?|"
        "{p} people wait and {q} others join them. How many people wait now?|"
        "Add {p} {y} to {q} {y}. How many {y} do you get?|"
        "The house has {p} {y} and the garden {q}. How many {y} are there "
        "altogether?|"
        "A book costs {p} dollars more than a pen, and the pen costs {q} "
        "dollars. What does the book cost?"
    ),
    "-": (
        "There were {s} {y} and {q} of them left. How many {y} stayed?|"
        "A shop had {s} {y} and sold {q}. How many {y} does it still have?|"
        "{q} of {s} {y} are broken. How many {y} are fine?|"
        "From {s} {y} we take {q}. How many {y} remain?|"
        "A {x} had {s} {y} but {q} were lost. How many {y} are left?|"
        "{s} birds sat on a tree and {q} flew away. How many birds are still "
        "there?|"
        "A {x} of {s} dollars is now {q} dollars cheaper. How much is it?|"
        "It was {s} degrees and got {q} degrees colder. How many degrees is it "
        "now?|"
        "The road is {s} miles long and we have done {q}. How many miles are "
        "left?|"
        "We invited {s} guests, but {q} did not come. How many guests came?|"
        "I want {s} {y} and have {q}. How many {y} do I still need?|"
        "A book has {s} pages and {q} are read. How many pages are unread?|"
        "{s} seats, {q} taken. How many seats are free?|"
        "Out of {s} {y} the wind took {q}. How many {y} are left?|"
        "How many more are {s} {y} than {q} {y}?"
    ),
}


def _short(s: Source) -> Item:
    """One step, told in many small ways, without a person."""
    rng = s.rng
    sign = rng.choice("+-*/")
    template = s.phrase(SHORT[sign])
    thing, one = s.thing(), s.plain_word(0.6)
    a, b = factors(rng, LIMIT)
    if min(a, b) < 2:
        a, b = 6, 7
    p = rng.randint(1, LIMIT - 1)
    q = rng.randint(1, LIMIT - p)
    question = template.format(x=one, y=thing, a=a, b=b, c=a * b, p=p, q=q, s=p + q)
    step, result = {
        "*": (f"{b}*{a}={a * b}", a * b),
        "/": (f"{a * b}/{b}={a}", a),
        "+": (f"{p}+{q}={p + q}", p + q),
        "-": (f"{p + q}-{q}={p}", p),
    }[sign]
    unit = _unit(template, thing, one)
    return _item(s, question, [f"{step} {unit}."], result)


def _unit(template: str, thing: str, one: str) -> str:
    """What the last sentence of a short story counts."""
    asked = re.split(r"(?<=[.:?,]) ", template)[-1]
    if "{x}s are needed" in asked or "{x}s can" in asked:
        return one + "s"
    if "groups" in asked:
        return "groups"
    if "pay" in asked or "cost" in asked or "How much" in asked:
        return "dollars"
    if "heavy" in asked:
        return "kilos"
    for word in (
        "children",
        "students",
        "birds",
        "guests",
        "pages",
        "seats",
        "miles",
        "degrees",
        "minutes",
        "meters",
        "people",
    ):
        if word in asked:
            return word
    return thing


FAMILIES: tuple[Callable[[Source], Item], ...] = (
    _story,
    _story,
    _story,
    _short,
    _short,
    _short,
    _groups,
    _groups,
    _shop,
    _shop,
    _share,
    _compare,
    _parts,
    _rate,
    _rate,
    _age,
)


def word_problem(s: Source) -> Item:
    return s.rng.choice(FAMILIES)(s)
