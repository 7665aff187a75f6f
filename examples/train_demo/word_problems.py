"""Word problems in one to three steps, every step an equation with its unit.

A problem is composed of sentences, each with many phrasings; verbs agree with the subject and
change tense.
"""

import random
import re
from collections.abc import Callable
from typing import Any

from examples.train_demo.arithmetic import LIMIT, OPERATORS, equation, factors
from examples.train_demo.words import Item, Person, Source, bank

BANK = bank("word_problems")
PAST: dict[str, str] = BANK["past"]
PLAIN = {"has": "have", "does": "do", "is": "are", "goes": "go", "was": "were"}


def agree(text: str) -> str:
    """Make verbs agree with I and we: have instead of has."""

    def base(match: re.Match[str]) -> str:
        subject, verb = match[1], match[2]
        plain = PLAIN.get(verb, verb.removesuffix("s"))
        if subject == "I" and verb in ("is", "was"):
            plain = {"is": "am", "was": "was"}[verb]
        return f"{subject} {plain}"

    text = re.sub(r"\b(I|[Ww]e) ([a-z]+)\b", base, text)
    text = re.sub(r"\b(does|has) (I|we)\b", lambda m: f"{PLAIN[m[1]]} {m[2]}", text)
    text = re.sub(r"\b(is|are) I\b", "am I", text)
    return re.sub(r"\bis we\b", "are we", text)


class Problem:
    """A word problem as it is told: sentences and equations so far, and the values they name."""

    def __init__(self, s: Source, who: Person, *, past: bool = False, **values: Any) -> None:
        self.source, self.past = s, past
        self.values = who.values() | values
        self.sentences: list[str] = []
        self.steps: list[str] = []
        self.result = 0

    def sentence(self, *banks: str, past: bool = False, **values: Any) -> str:
        """Return a phrasing with its values; verbs change tense before names are filled in."""
        text = self.source.phrase([text for name in banks for text in BANK[name]])
        if past:  # questions keep the infinitive after do, does and did
            text = re.sub(r"[A-Za-z]+", lambda m: PAST.get(m[0], m[0]), text)
        text = agree(text.format(**self.values | values))
        return text[0].upper() + text[1:]

    def tell(self, bank: str, **values: Any) -> None:
        self.sentences.append(self.sentence(bank, past=self.past, **values))

    def step(self, a: int, sign: str, b: int, unit: str = "", before: str = "") -> int:
        """Add an equation and return its result; its unit is by default the things."""
        self.steps.append(f"{before}{equation(a, sign, b)} {unit or self.values['thing']}.")
        self.result = OPERATORS[sign](a, b)
        return self.result

    def ask(self, *banks: str, **values: Any) -> Item:
        """End with a question after the last result."""
        self.sentences.append(self.sentence(*banks, **values))
        return solved(self.source, " ".join(self.sentences), self.steps, self.result)


def solved(s: Source, question: str, steps: list[str], result: int) -> Item:
    return s.item("math", question, " ".join(steps) + f" The answer is {result}.")


def _story(s: Source) -> Item:
    """Return a story of a number of things that grows and shrinks."""
    rng, who = s.rng, s.person()
    p = Problem(s, who, other=s.name(), thing=s.thing(), past=s.chance(0.35))
    events = rng.choice([1, 1, 2, 2, 3])
    now = start = rng.randint(2, LIMIT - 20 if s.chance(0.6) else 20)
    for i in range(events):
        gain = now < 3 or (now < LIMIT - 5 and s.chance(0.5))
        n = rng.randint(1, min(60, LIMIT - now) if gain else now - 1)
        subject: dict[str, str] = {}
        if i == 0 and s.chance(0.5):
            subject = {"She": who.name, "she": who.name}
        elif i and s.chance(0.3):
            subject = {"She": rng.choice(["Then ", "Later ", "After that "]) + who.she}
        p.tell("gain" if gain else "loss", n=n, **subject)
        now = p.step(now, "+" if gain else "-", n)
    if s.chance(0.2) and events < 3:  # the same in one sentence: if ..., how many?
        joined = " and ".join(
            t[0].lower() + t[1:-1] if t.split()[0] != who.name else t[:-1] for t in p.sentences
        )
        for word in ("then ", "later ", "after that "):
            joined = joined.replace(" and " + word, " and then ")
        p.sentences.clear()
        return p.ask("if", n=start, joined=joined)
    place = rng.choice(BANK["places"])
    p.sentences.insert(0, p.sentence("start", past=p.past, n=start, place=place))
    return p.ask("end") if gain else p.ask("end", "end_after_loss")


def _groups(s: Source) -> Item:
    """Return a story of boxes of things, to which some are added or from which some are taken."""
    rng = s.rng
    p = Problem(s, s.person(), thing=s.thing(), past=s.chance(0.25))
    a, b = factors(rng, LIMIT)
    boxes, box = rng.choice(BANK["containers"])
    p.values |= {"boxes": boxes, "box": box, "a": a, "b": b}
    p.tell("groups")
    total = p.step(a, "*", b)
    kind = rng.choice(["all", "less", "more"])
    if kind == "all" or total < 3 or total > LIMIT - 2:
        return p.ask("groups_total")
    gain = kind == "more"
    n = rng.randint(1, min(60, LIMIT - total if gain else total - 1))
    p.tell("gain" if gain else "loss", n=n, other=s.name())
    p.step(total, "+" if gain else "-", n)
    return p.ask("groups_now") if gain else p.ask("groups_now", "groups_left")


def _share(s: Source) -> Item:
    """Return a story of things that are shared equally, sometimes after more are found."""
    rng = s.rng
    p = Problem(s, s.person(), thing=s.thing(), past=s.chance(0.3))
    k, q = factors(rng, LIMIT)
    total = start = k * q
    p.values |= {"k": k, "friends": rng.choice(BANK["friends"])}
    if s.chance(0.5) and total > 3:
        start = rng.randint(1, total - 1)
        p.step(start, "+", total - start)
        p.tell("gain", n=total - start, other=s.name())
    p.step(total, "/", k)
    p.sentences.insert(0, p.sentence("share_start", past=p.past, n=start))
    return p.ask("share")


def _second_factors(rng: random.Random, first: int) -> tuple[int, int]:
    """Return factors whose product, beside the first one, stays within the limit of sums."""
    while True:
        c, d = factors(rng, 90)
        if first + c * d <= LIMIT:
            return c, d


def _shop(s: Source) -> Item:
    """Return a problem of one or two purchases, with or without change."""
    rng, who, past, one = s.rng, s.person(), s.chance(0.35), s.thing()
    coins = rng.choice(["dollars"] * 4 + ["euros", "coins", "cents", "pounds"])
    a, b = factors(rng, 90)
    p = Problem(s, who, past=past, coins=coins, x=one, a=a, b=b)
    kind = rng.choice(["one", "two", "two", "change", "change"])
    total = p.step(a, "*", b, coins, f"The {one} cost ")
    if kind == "two":
        two = s.thing()
        c, d = _second_factors(rng, total)
        p.tell("buy_two", y=two, c=c, d=d)
        p.step(total, "+", p.step(c, "*", d, coins, f"The {two} cost "), coins, "Together ")
    elif kind == "change":
        money = rng.randint(total + 1, LIMIT)
        p.tell("buy_with_money", money=money)
        p.step(money, "-", total, coins)
        return p.ask("change")
    else:
        p.tell("buy")
    return p.ask("cost")


def _rate(s: Source) -> Item:
    """Return a problem of a rate per hour or day, for one or two stretches, or towards a goal."""
    rng, who = s.rng, s.person()
    moves = s.chance(0.55)
    verb = rng.choice(BANK["moves" if moves else "makes"])
    unit = rng.choice(["kilometers", "miles"]) if moves else s.thing()
    hour = "hour" if moves else rng.choice(["day", "week", "hour", "minute"])
    if verb == "read":
        unit = rng.choice(["pages", "books"])
    a, b = factors(rng, 90)
    hours = hour + "s" if b != 1 else hour
    p = Problem(s, who, thing=unit, verb=verb, unit=unit, hour=hour, hours=hours, a=a, b=b)
    p.tell("rate")
    kind = rng.choice(["one", "goal", "two"])
    if kind == "two":
        return _second_rate(p, a, b)
    total = p.step(a, "*", b)
    if kind == "one":
        return p.ask("how_far" if unit in "miles kilometers" else "how_many")
    goal = rng.randint(total + 1, LIMIT)
    p.step(goal, "-", total)
    return p.ask("goal", goal=goal)


def _second_rate(p: Problem, a: int, b: int) -> Item:
    """Add a stretch at another rate; the question gives its length, or that of both together."""
    total = p.step(a, "*", b, before="First ")
    c, d = _second_factors(p.source.rng, total)
    p.values |= {"c": c, "d": d, "both": b + d}
    then = p.sentence("then")
    of_both = p.source.chance(0.5)
    p.sentences.append(then if of_both else p.sentence("then_for"))
    if of_both:
        p.step(b + d, "-", b, str(p.values["hours"]), "Left ")
    p.step(total, "+", p.step(c, "*", d, before="Then "), before="Together ")
    return p.ask("after_both" if of_both else "total")


def _compare(s: Source) -> Item:
    """Return a problem of two people, one with more, fewer or N times as many things."""
    rng, who, other = s.rng, s.person(), s.name()
    p = Problem(s, who, other=other, thing=s.thing(), past=s.chance(0.3))
    kind, both = rng.choice(["times", "more", "fewer"]), s.chance(0.6)
    sign = {"times": "*", "more": "+", "fewer": "-"}[kind]
    while True:
        a, n = rng.randint(1, 50), rng.randint(1, 40)
        if kind == "times":
            a, n = factors(rng, LIMIT)
        b = OPERATORS[sign](a, n)
        if b > 0 and n > 1 and a + b <= LIMIT:
            break
    twice = kind == "times" and n == 2 and s.chance(0.7)
    p.values |= {"a": a, "n": "two" if twice else n}
    p.tell("first_has")
    p.tell("twice" if twice else kind)
    p.step(a, sign, n, before=f"{other} has ")
    if both:
        p.step(a, "+", b, before="Together ")
    return p.ask("both_have" if both else "other_has")


def _parts(s: Source) -> Item:
    """Return a problem of kinds that make a whole, or of a whole without one kind."""
    rng = s.rng
    p = Problem(s, s.person(), thing=s.thing(), past=s.chance(0.3))
    thing = str(p.values["thing"])
    colors = rng.sample(BANK["kinds"], 3)
    count = rng.choice([2, 2, 3])
    numbers = [rng.randint(1, LIMIT // 3) for _ in range(count)]
    if s.chance(0.35):
        p.tell("of_whole", whole=sum(numbers), part=numbers[0], red=colors[0])
        p.step(sum(numbers), "-", numbers[0])
        return p.ask("not_of_kind", red=colors[0])
    listed = [f"{n} {c}" for n, c in zip(numbers, colors, strict=False)]
    what = thing
    if s.chance(0.4):
        others = [thing] + [s.thing() for _ in range(count - 1)]
        listed = [f"{n} {o}" for n, o in zip(numbers, others, strict=False)]
        what = "things"
    else:
        listed[-1] += f" {thing}"
    p.values |= {"text": ", ".join(listed[:-1]) + " and " + listed[-1], "what": what}
    p.tell("parts")
    total = numbers[0]
    for n in numbers[1:]:
        total = p.step(total, "+", n, what)
    return p.ask("parts_total")


def _age(s: Source) -> Item:
    """Return a problem about how old somebody is, was or will be."""
    rng, who, other = s.rng, s.person(), s.name()
    a, n = rng.randint(3, 60), rng.randint(1, 35)
    older = a <= n or s.chance(0.5)
    p = Problem(s, who, other=other, a=a, n=n)
    p.tell("age")
    kind = rng.choice(["other", "future", "both"])
    before = "" if kind == "future" else f"{other} is "
    b = p.step(a, "+" if older else "-", n, "years", before)
    if kind == "future":
        return p.ask("age_later" if older else "age_before")
    p.tell("older" if older else "younger")
    if kind == "both":
        p.step(a, "+", b, "years", "Together ")
    return p.ask("ages_together" if kind == "both" else "age_of_other")


def _short(s: Source) -> Item:
    """Return a problem of one step, without a person, in a short phrasing."""
    rng = s.rng
    sign = rng.choice("+-*/")
    template = s.phrase(BANK["short"][sign])
    thing, one = s.thing(), s.plain_word(0.6)
    a, b = factors(rng, LIMIT)
    if min(a, b) < 2:
        a, b = 6, 7
    p = rng.randint(1, LIMIT - 1)
    q = rng.randint(1, LIMIT - p)
    numbers: list[str] = BANK["numbers"]
    said = numbers[b] if b < len(numbers) and s.chance(0.2) else b
    question = template.format(x=one, y=thing, a=a, b=said, c=a * b, p=p, q=q, s=p + q)
    left, right = {"*": (b, a), "/": (a * b, b), "+": (p, q), "-": (p + q, q)}[sign]
    asked = re.split(r"(?<=[.:?,]) ", template)[-1]
    counted = (unit for words, unit in BANK["units"].items() if words in asked)
    unit = next(counted, "{y}").format(x=one, y=thing)
    step = f"{equation(left, sign, right)} {unit}."
    return solved(s, question[0].upper() + question[1:], [step], OPERATORS[sign](left, right))


FAMILIES: tuple[Callable[[Source], Item], ...] = (
    _story, _story, _story, _short, _short, _short, _groups, _groups, _shop, _shop, _share,
    _compare, _parts, _rate, _rate, _age,
)  # fmt: skip


def word_problem(s: Source) -> Item:
    return s.rng.choice(FAMILIES)(s)
