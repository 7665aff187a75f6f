"""Facts in a sentence, asked for as JSON; the values are copied, the keys chosen."""

import json
import random

from examples.train_demo.former.words import CITIES, FIRST, SURNAMES, THINGS
from examples.train_demo.words import Item

JOBS = "nurse teacher baker pilot farmer lawyer painter driver chef engineer doctor writer".split()


def _person(rng: random.Random) -> tuple[dict[str, str | int], str]:
    name = rng.choice(FIRST)
    if rng.random() < 0.5:
        name += " " + rng.choice(SURNAMES)
    f: dict[str, str | int] = {
        "name": name, "age": rng.randint(18, 99), "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
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
        "customer": rng.choice(FIRST), "item": rng.choice(THINGS), "quantity": rng.randint(2, 99),
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
        "place": rng.choice(CITIES), "day": rng.choice(days), "hour": rng.randint(6, 23),
        "guests": rng.randint(5, 199),
    }  # fmt: skip
    return f, rng.choice([
        "The {event} in {place} starts on {day} at {hour} with {guests} guests.",
        "On {day} at {hour}, {guests} guests come to the {event} in {place}.",
        "{place} hosts a {event} for {guests} guests on {day} at {hour}.",
    ]).format(**f)  # fmt: skip


def _as_list(rng: random.Random, values: dict[str, str | int]) -> str:
    """The easiest sentence: every value behind its key. It teaches to copy."""
    pairs = [f"{key}: {value}" for key, value in values.items()]
    rng.shuffle(pairs)
    return ", ".join(pairs) + "."


def json_extraction(rng: random.Random) -> Item:
    values, sentence = rng.choice([_person, _person, _order, _event])(rng)
    if rng.random() < 0.3:
        sentence = _as_list(rng, values)
    keys = rng.sample(list(values), rng.randint(2, len(values)))
    asked = ", ".join(keys[:-1]) + " and " + keys[-1]
    ask = rng.choice(["Extract {} as JSON: ", "Give {} as JSON: ", "Return JSON with {}: "])
    answer = json.dumps({key: values[key] for key in keys}, separators=(",", ":"))
    return Item("json", ask.format(asked) + sentence, answer)
