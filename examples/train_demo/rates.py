"""Problems of a rate per hour or day, for one or two stretches, or towards a goal."""

from typing import Any

from examples.train_demo.arithmetic import LIMIT, factors
from examples.train_demo.sentences import fill, solved
from examples.train_demo.words import Item, Source, bank

BANK = bank("rates")


def rate(s: Source) -> Item:
    """Return a problem of a rate per hour or day, for one or two stretches, or towards a goal."""
    rng, who = s.rng, s.person()
    if s.chance(0.55):
        verb, unit, hour = (
            rng.choice(["run", "walk", "ride", "swim", "drive", "row", "fly", "hike"]),
            rng.choice(["kilometers", "miles"]),
            "hour",
        )
    else:
        verb, unit, hour = (
            rng.choice("read write solve make bake sell paint plant fold collect".split()),
            s.thing(),
            rng.choice(["day", "week", "hour", "minute"]),
        )
        if verb == "read":
            unit = rng.choice(["pages", "books"])
    a, b = factors(rng, 90)
    hours = hour + "s" if b != 1 else hour
    values = who.values() | {"verb": verb, "unit": unit, "hour": hour, "hours": hours}
    values |= {"a": a, "b": b}
    first = fill(s, BANK["rate"], False, **values)
    total = a * b
    steps = [f"{a}*{b}={total} {unit}."]
    kind = rng.choice(["one", "goal", "two"])
    if kind == "goal":
        goal = rng.randint(total + 1, LIMIT)
        steps.append(f"{goal}-{total}={goal - total} {unit}.")
        question = first + " " + fill(s, BANK["goal"], False, goal=goal, **values)
        return solved(s, question, steps, goal - total)
    if kind == "one":
        asked = BANK["how_far" if "miles kilometers".find(unit) >= 0 else "how_many"]
        end = fill(s, asked, False, **values)
        return solved(s, f"{first} {end}", steps, total)
    return _second_rate(s, values, total, first)


def _second_rate(s: Source, values: dict[str, Any], total: int, first: str) -> Item:
    """Add a stretch at another rate; the question gives its length, or that of both together."""
    a, b, unit, hours = values["a"], values["b"], values["unit"], values["hours"]
    while True:
        c, d = factors(s.rng, 90)
        if total + c * d <= LIMIT:
            break
    values |= {"c": c, "d": d, "both": b + d}
    result = total + c * d
    second = fill(s, BANK["then"], False, **values)
    if s.chance(0.5):
        end = fill(s, BANK["after_both"], False, **values)
        steps = [
            f"First {a}*{b}={total} {unit}.",
            f"Left {b + d}-{b}={d} {hours}.",
            f"Then {c}*{d}={c * d} {unit}.",
        ]
    else:
        second = fill(s, BANK["then_for"], False, **values)
        end = fill(s, BANK["total"], False, **values)
        steps = [f"First {a}*{b}={total} {unit}.", f"Then {c}*{d}={c * d} {unit}."]
    steps.append(f"Together {total}+{c * d}={result} {unit}.")
    return solved(s, f"{first} {second} {end}", steps, result)
