"""Stories about a number of things that grows, shrinks, is grouped or shared."""

from examples.train_demo.arithmetic import LIMIT, factors
from examples.train_demo.sentences import GAIN, LOSS, PLACES, fill, solved, two_people
from examples.train_demo.words import Item, Person, Source, bank

BANK = bank("stories")


def story(s: Source) -> Item:
    """Return a story of a number of things that grows and shrinks."""
    rng, (who, other), thing, past = s.rng, two_people(s), s.thing(), s.chance(0.35)
    events = rng.choice([1, 1, 2, 2, 3])
    now = start = rng.randint(2, LIMIT - 20 if s.chance(0.6) else 20)
    texts, steps = [], []
    values = who.values()
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
    begin = fill(s, BANK["start"], past, n=start, thing=thing, place=rng.choice(PLACES), **values)
    end = BANK["end"] if last_gain else BANK["end"] + BANK["end_after_loss"]
    question = fill(s, end, False, thing=thing, **values)
    return solved(s, " ".join([begin, *texts, question]), steps, now)


def _if_story(
    s: Source, who: Person, thing: str, start: int, texts: list[str], steps: list[str], now: int
) -> Item:
    """Return the same story in one sentence: if ..., how many?"""
    joined = " and ".join(
        t[0].lower() + t[1:-1] if t.split()[0] != who.name else t[:-1] for t in texts
    )
    for word in ("then ", "later ", "after that "):
        joined = joined.replace(" and " + word, " and then ")
    question = fill(s, BANK["if"], False, n=start, thing=thing, joined=joined, **who.values())
    return solved(s, question, steps, now)


def groups(s: Source) -> Item:
    """Return a story of boxes of things, to which some are added or from which some are taken."""
    rng, who, thing, past = s.rng, s.person(), s.thing(), s.chance(0.25)
    a, b = factors(rng, LIMIT)
    boxes, box = rng.choice(BANK["containers"])
    values = who.values() | {"thing": thing, "boxes": boxes, "box": box, "a": a, "b": b}
    start = fill(s, BANK["groups"], past, **values)
    total = a * b
    steps = [f"{a}*{b}={total} {thing}."]
    kind = rng.choice(["all", "less", "more"])
    if kind == "all" or total < 3 or total > LIMIT - 2:
        end = fill(s, BANK["groups_total"], False, **values)
        return solved(s, f"{start} {end}", steps, total)
    c = rng.randint(1, min(60, total - 1 if kind == "less" else LIMIT - total))
    result = total - c if kind == "less" else total + c
    steps.append(f"{total}{'-' if kind == 'less' else '+'}{c}={result} {thing}.")
    event = fill(s, LOSS if kind == "less" else GAIN, past, n=c, other=s.name(), **values)
    ends = BANK["groups_now"] + (BANK["groups_left"] if kind == "less" else [])
    end = fill(s, ends, False, **values)
    return solved(s, f"{start} {event} {end}", steps, result)


def share(s: Source) -> Item:
    """Return a story of things that are shared equally, sometimes after more are found."""
    rng, who, thing, past = s.rng, s.person(), s.thing(), s.chance(0.3)
    k, q = factors(rng, LIMIT)
    total = k * q
    values = who.values() | {"thing": thing, "k": k, "friends": rng.choice(BANK["friends"])}
    steps, start = [], total
    texts = []
    if s.chance(0.5) and total > 3:
        start = rng.randint(1, total - 1)
        more = total - start
        steps.append(f"{start}+{more}={total} {thing}.")
        texts.append(fill(s, GAIN, past, n=more, other=s.name(), **values))
    steps.append(f"{total}/{k}={q} {thing}.")
    begin = fill(s, BANK["share_start"], past, n=start, **values)
    end = fill(s, BANK["share"], False, **values)
    return solved(s, " ".join([begin, *texts, end]), steps, q)
