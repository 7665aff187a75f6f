"""Facts in a sentence, asked for as JSON: the values are copied, the keys given."""

import json
from typing import NamedTuple

from examples.train_demo.words import Item, Source, bank

BANK = bank("json_extraction")
WEEK: list[str] = BANK["week"]
EVENTS: list[str] = BANK["events"]
ANIMALS: list[str] = BANK["animals"]
COLORS: list[str] = BANK["colors"]
KEYS: dict[str, list[str]] = BANK["keys"]  # what a key may be called


class Facts(NamedTuple):
    values: dict[str, str | int]
    sentence: str


def _a(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _person(s: Source) -> Facts:
    full = s.full_name()
    f: dict[str, str | int] = {
        "name": full,
        "age": s.rng.randint(2, 99),
        "city": s.city(),
        "job": s.job(),
    }
    return _facts(s, f, BANK["person"], a=_a(str(f["job"])))


def _facts(s: Source, f: dict[str, str | int], kinds: dict[str, list[str]], **more: str) -> Facts:
    names = s.rng.choice([*kinds, next(iter(kinds))])
    sentence = s.phrase(kinds[names]).format(**f, **more)
    return Facts({k: f[k] for k in names.split()}, sentence)


def _order(s: Source) -> Facts:
    f: dict[str, str | int] = {
        "customer": s.name(),
        "item": s.thing(),
        "quantity": s.rng.randint(2, 99),
        "price": s.rng.randint(2, 999),
    }
    return _facts(s, f, BANK["order"])


def _event(s: Source) -> Facts:
    event = s.word_of(EVENTS)
    f: dict[str, str | int] = {
        "event": event,
        "place": s.city(),
        "day": s.rng.choice(WEEK),
        "hour": s.rng.randint(1, 23),
        "guests": s.rng.randint(5, 500),
    }
    if s.lower:
        f["day"] = str(f["day"]).lower()
    return _facts(s, f, BANK["event"], a=_a(event))


def _pet(s: Source) -> Facts:
    animal = s.word_of(ANIMALS)
    f: dict[str, str | int] = {
        "owner": s.name(),
        "animal": animal,
        "pet_name": s.name(),
        "color": s.rng.choice(COLORS),
        "age": s.rng.randint(1, 30),
    }
    return _facts(s, f, BANK["pet"], a=_a(animal))


def _trip(s: Source) -> Facts:
    f: dict[str, str | int] = {
        "name": s.name(),
        "from": s.city(),
        "to": s.city(),
        "day": s.rng.choice(WEEK),
        "price": s.rng.randint(5, 999),
    }
    if s.lower:
        f["day"] = str(f["day"]).lower()
    return _facts(s, f, BANK["trip"])


def invented_facts(s: Source) -> tuple[dict[str, str | int], str]:
    """Return invented keys, each beside its value: the easiest sentence, which teaches copying."""
    values: dict[str, str | int] = {}
    for _ in range(s.rng.randint(2, 5)):
        key = s.invented(s.rng.choice([1, 2])) if s.chance(0.7) else s.rng.choice(list(KEYS))
        value: str | int = s.rng.randint(1, 999)
        if s.chance(0.7):
            value = s.rng.choice([s.name, s.city, s.thing, s.plain_word])()
        values[key] = value
    pairs = [s_join(s, key, value) for key, value in values.items()]
    return values, ", ".join(pairs) + s.rng.choice(["", "."])


def s_join(s: Source, key: str, value: str | int) -> str:
    return f"{key}{s.rng.choice([': ', ': ', ' is ', '='])}{value}"


def _listed(s: Source, keys: list[str]) -> str:
    if len(keys) == 1:
        return keys[0]
    if s.chance(0.2):
        return ", ".join(keys)
    return ", ".join(keys[:-1]) + " and " + keys[-1]


def compact(values: dict[str, str | int]) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


def _some_facts(s: Source) -> Facts:
    return s.rng.choice([_person, _person, _person, _order, _order, _event, _pet, _trip])(s)


def named_facts(s: Source) -> Facts:
    """Return facts under any of the names that their keys may have."""
    if s.chance(0.25):
        return Facts(*invented_facts(s))
    values, sentence = _some_facts(s)
    names: dict[str, str] = {}
    for key in values:
        name = s.rng.choice(KEYS[key])
        names[key] = key if name in names.values() or s.chance(0.4) else name
    if len(set(names.values())) < len(names):
        names = {key: key for key in values}
    named = {names[key]: value for key, value in values.items()}
    if s.chance(0.15):
        pairs = [s_join(s, key, value) for key, value in named.items()]
        s.rng.shuffle(pairs)
        sentence = ", ".join(pairs) + "."
    return Facts(named, sentence)


def json_extraction(s: Source) -> Item:
    if s.chance(0.1):  # all facts, by their usual names, as the sentence has them
        values, sentence = _some_facts(s)
        keys = sorted(values, key=lambda key: sentence.find(str(values[key])))
        question = s.phrase(BANK["ask_all"]).format(s=sentence)
    else:
        values, sentence = named_facts(s)
        keys = s.rng.sample(list(values), s.rng.randint(1, len(values)))
        question = s.phrase(BANK["ask"]).format(k=_listed(s, keys), s=sentence)
    answer = compact({key: values[key] for key in keys})
    return s.item("json", question, answer.lower() if s.lower else answer)
