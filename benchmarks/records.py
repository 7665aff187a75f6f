"""Held-out questions of the demo models' JSON task, their schemas, and marks for answers."""

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final, NamedTuple

from examples.train_demo.tasks import draw
from examples.train_demo.words import ANIMALS, CITIES, COLORS, DAYS, EVENTS, JOBS, THINGS, Item

# What the task's generator draws from, besides words that it invents.
LOWER: Final = [day.lower() for day in DAYS]
CHOICES: Final = (DAYS, LOWER, EVENTS, COLORS, ANIMALS, JOBS, CITIES, THINGS)


class Marks(NamedTuple):
    """How good answers are."""

    right: float = 0.0  # share of the fields
    valid: float = 0.0  # share of the answers that are JSON with the fields asked for
    records: int = 0


def questions(count: int, seed: int) -> list[Item]:
    """Return distinct held-out questions of the JSON task."""
    rng, found = Random(seed), dict[str, Item]()
    while len(found) < count:
        item = draw(rng, "json", "entities")
        found[item.question] = item
    return list(found.values())


def schema_of(item: Item) -> dict[str, Any]:
    """Return the schema of a question's answer, whose keys may have any names."""
    properties = {name: field_of(value) for name, value in json.loads(item.answer).items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


def field_of(value: str | int) -> Mapping[str, Any]:
    """Return the schema of a value; a name or an invented word may be any string."""
    if isinstance(value, int):
        return {"type": "integer", "minimum": 1, "maximum": 999}
    for words in CHOICES:
        if value in words:
            return {"enum": list(words)}
    return {"type": "string", "maxLength": 32}


def marks(items: Sequence[Item], texts: Sequence[str]) -> Marks:
    """Return how many of the fields are right, and how many of the answers are valid."""
    fields = right = valid = 0
    for item, text in zip(items, texts, strict=True):
        wanted, made = json.loads(item.answer), _parsed(text)
        fields += len(wanted)
        right += sum(made.get(name) == value for name, value in wanted.items())
        valid += made.keys() == wanted.keys()
    return Marks(right / fields, valid / len(items), len(items))


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
