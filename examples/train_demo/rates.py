"""Problems of a rate per hour or day, for one or two stretches, or towards a goal."""

from typing import Any

from examples.train_demo.arithmetic import LIMIT, factors
from examples.train_demo.sentences import fill, solved
from examples.train_demo.words import Item, Source

RATE = (
    "{name} can {verb} {a} {unit} per {hour} for {b} {hours}.|"
    "{name} {verb}s {a} {unit} per {hour} for {b} {hours}.|"
    "{name} {verb}s {a} {unit} every {hour} for {b} {hours}.|"
    "Every {hour} {name} {verb}s {a} {unit}. {She} does so for {b} "
    "{hours}.|"
    "For {b} {hours} {name} {verb}s {a} {unit} each {hour}.|"
    "{name} {verb}s {a} {unit} in one {hour} and keeps on for {b} {hours}.|"
    "{name} {verb}s for {b} {hours}, {a} {unit} per {hour}.|"
    "{name} {verb}s {a} {unit} a {hour} for {b} {hours}.|"
    "Each {hour} {name} {verb}s {a} {unit}, for {b} {hours}.|"
    "At {a} {unit} per {hour}, {name} {verb}s for {b} {hours}.|"
    "In one {hour} {name} {verb}s {a} {unit}. {She} goes on for {b} {hours}.|"
    "{name} {verb}s {a} {unit} per {hour}. This goes on for {b} {hours}."
)
GOAL = (
    "{She} wants to {verb} {goal} {unit}. How many are left?|"
    "The goal is {goal} {unit}. How many {unit} remain?|"
    "How many of {goal} {unit} are left then?|"
    "How many more {unit} must {she} {verb} to reach {goal}?|"
    "{She} needs {goal} {unit} in all. How many {unit} are missing?|"
    "{She} must {verb} {goal} {unit}. How many are still to do?|"
    "The plan is {goal} {unit}. How many {unit} are still missing?|"
    "{goal} {unit} are needed. How many are left?"
)
HOW_FAR = (
    "How many {unit} is that?|How many {unit} does {she} {verb}?|"
    "How many {unit} does {name} {verb} in total?|How many {unit} in all?|"
    "How far is that?"
)
HOW_MANY = (
    "How many {unit} is that?|How many {unit} does {she} {verb}?|"
    "How many {unit} does {name} {verb} in total?|How many {unit} in all?|What is the total?|"
    "How many {unit} does that make?|How many {unit} altogether?"
)
THEN_RATE = (
    "After that, {she} {verb}s {c} {unit} per {hour}.|"
    "Then {she} {verb}s {c} {unit} per {hour}.|"
    "Later {she} {verb}s {c} {unit} every {hour}.|"
    "From then on {she} {verb}s {c} {unit} a {hour}."
)
AFTER_BOTH = (
    "How many {unit} can {she} {verb} in {both} {hours}?|"
    "How many {unit} does {name} {verb} in {both} {hours}?|"
    "How many {unit} is that after {both} {hours}?"
)
THEN_RATE_FOR = (
    "Then {she} {verb}s {c} {unit} per {hour} for {d} {hours}.|"
    "After that {she} {verb}s {c} {unit} per {hour} for {d} {hours}.|"
    "For another {d} {hours} {she} {verb}s {c} {unit} each {hour}."
)
RATE_TOTAL = (
    "How many {unit} is that in total?|"
    "How many {unit} does {she} {verb} in total?|"
    "How many {unit} altogether?|How many {unit} in all?"
)


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
    first = fill(s, RATE, False, **values)
    total = a * b
    steps = [f"{a}*{b}={total} {unit}."]
    kind = rng.choice(["one", "goal", "two"])
    if kind == "goal":
        goal = rng.randint(total + 1, LIMIT)
        steps.append(f"{goal}-{total}={goal - total} {unit}.")
        question = first + " " + fill(s, GOAL, False, goal=goal, **values)
        return solved(s, question, steps, goal - total)
    if kind == "one":
        end = fill(s, HOW_FAR if "miles kilometers".find(unit) >= 0 else HOW_MANY, False, **values)
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
    second = fill(s, THEN_RATE, False, **values)
    if s.chance(0.5):
        end = fill(s, AFTER_BOTH, False, **values)
        steps = [
            f"First {a}*{b}={total} {unit}.",
            f"Left {b + d}-{b}={d} {hours}.",
            f"Then {c}*{d}={c * d} {unit}.",
        ]
    else:
        second = fill(s, THEN_RATE_FOR, False, **values)
        end = fill(s, RATE_TOTAL, False, **values)
        steps = [f"First {a}*{b}={total} {unit}.", f"Then {c}*{d}={c * d} {unit}."]
    steps.append(f"Together {total}+{c * d}={result} {unit}.")
    return solved(s, f"{first} {second} {end}", steps, result)
