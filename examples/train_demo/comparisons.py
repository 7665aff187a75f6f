"""Two people compared, parts of a whole, and ages."""

from examples.train_demo.arithmetic import LIMIT, factors
from examples.train_demo.sentences import fill, solved, two_people
from examples.train_demo.words import Item, Source, bank

BANK = bank("comparisons")


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
    values = who.values() | {"other": other, "thing": thing, "a": a, "n": n}
    if kind == "times" and n == 2 and s.chance(0.7):
        values["n"] = "two"
    first = fill(s, BANK["first_has"], past, **values)
    relation = "twice" if values["n"] == "two" else kind
    second = fill(s, BANK[relation], past, **values)
    sign = {"times": "*", "more": "+", "fewer": "-"}[kind]
    steps = [f"{other} has {a}{sign}{n}={b} {thing}."]
    if not both:
        end = fill(s, BANK["other_has"], False, **values)
        return solved(s, f"{first} {second} {end}", steps, b)
    steps.append(f"Together {a}+{b}={a + b} {thing}.")
    end = fill(s, BANK["both_have"], False, **values)
    return solved(s, f"{first} {second} {end}", steps, a + b)


def parts(s: Source) -> Item:
    """Return a problem of kinds that make a whole, or of a whole without one kind."""
    rng, who, thing, past = s.rng, s.person(), s.thing(), s.chance(0.3)
    colors = rng.sample(
        "red blue green yellow black white big small old new broken wooden".split(), 3
    )
    count = rng.choice([2, 2, 3])
    numbers = [rng.randint(1, LIMIT // 3) for _ in range(count)]
    values = who.values() | {"thing": thing}
    if s.chance(0.35):
        whole, part = sum(numbers), numbers[0]
        values |= {"whole": whole, "part": part, "red": colors[0]}
        begin = fill(s, BANK["of_whole"], past, **values)
        end = fill(s, BANK["not_of_kind"], False, **values)
        step = f"{whole}-{part}={whole - part} {thing}."
        return solved(s, f"{begin} {end}", [step], whole - part)
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
    begin = fill(s, BANK["parts"], past, **values)
    end = fill(s, BANK["parts_total"], False, **values)
    total, steps = numbers[0], []
    for n in numbers[1:]:
        steps.append(f"{total}+{n}={total + n} {what}.")
        total += n
    return solved(s, f"{begin} {end}", steps, total)


def age(s: Source) -> Item:
    """Return a problem about how old somebody is, was or will be."""
    rng, (who, other) = s.rng, two_people(s)
    a, n = rng.randint(3, 60), rng.randint(1, 35)
    older = a <= n or s.chance(0.5)
    values = who.values() | {"other": other, "a": a, "n": n}
    first = fill(s, BANK["age"], False, **values)
    b = a + n if older else a - n
    kind = rng.choice(["other", "future", "both"])
    if kind == "future":
        end = fill(s, BANK["age_later" if older else "age_before"], False, **values)
        return solved(s, f"{first} {end}", [f"{a}{'+' if older else '-'}{n}={b} years."], b)
    second = fill(s, BANK["older" if older else "younger"], False, **values)
    steps = [f"{other} is {a}{'+' if older else '-'}{n}={b} years."]
    if kind == "other":
        end = fill(s, BANK["age_of_other"], False, **values)
        return solved(s, f"{first} {second} {end}", steps, b)
    end = fill(s, BANK["ages_together"], False, **values)
    return solved(s, f"{first} {second} {end}", [*steps, f"Together {a}+{b}={a + b} years."], a + b)
