"""Facts in a sentence, asked for as JSON: the values are copied, the keys given."""

import json
from typing import NamedTuple

from examples.train_demo.words import Item, Source, Values, bank

BANK = bank("json_extraction")
KEYS: dict[str, list[str]] = BANK["keys"]  # what a key may be called


class Facts(NamedTuple):
    values: Values
    sentence: str


def facts(s: Source, kinds: list[str]) -> Facts:
    """Return facts of one of the kinds, of which the sentence may have but some."""
    kind = BANK["facts"][s.rng.choice(kinds)]
    values, said = s.values(kind["values"]), kind["said"]
    keys = s.rng.choice([*said, next(iter(said))])
    vowel = "article" in kind and str(values[kind["article"]])[0] in "aeiou"
    sentence = s.phrase(said[keys]).format(**values, a="an" if vowel else "a")
    return Facts({key: values[key] for key in keys.split()}, sentence)


def invented_facts(s: Source) -> Facts:
    """Return invented keys, each beside its value: the easiest sentence, which teaches copying."""
    values: Values = {}
    for _ in range(s.rng.randint(2, 5)):
        key = s.invented(s.rng.choice([1, 2])) if s.chance(0.7) else s.rng.choice(list(KEYS))
        value: str | int = s.rng.randint(1, 999)
        if s.chance(0.7):
            value = s.rng.choice([s.name, s.city, s.thing, s.plain_word])()
        values[key] = value
    return Facts(values, ", ".join(_pairs(s, values)) + s.rng.choice(["", "."]))


def _pairs(s: Source, values: Values) -> list[str]:
    return [f"{key}{s.rng.choice([': ', ': ', ' is ', '='])}{v}" for key, v in values.items()]


def _listed(s: Source, keys: list[str]) -> str:
    if len(keys) == 1:
        return keys[0]
    if s.chance(0.2):
        return ", ".join(keys)
    return ", ".join(keys[:-1]) + " and " + keys[-1]


def compact(values: Values) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


def edited(values: Values, edit: str, key: str, new: str | int) -> Values:
    """Return the facts after an edit of one of them, or in reverse order."""
    if edit == "reverse":
        return dict(reversed(values.items()))
    if edit == "rename":
        return {str(new) if k == key else k: v for k, v in values.items()}
    if edit == "set":
        return values | {key: new}
    return {k: v for k, v in values.items() if (k == key) == (edit == "only")}  # or "without"


def _some_facts(s: Source) -> Facts:
    return facts(s, ["person", "person", "person", "order", "order", "event", "pet", "trip"])


def named_facts(s: Source) -> Facts:
    """Return facts under any of the names that their keys may have."""
    if s.chance(0.25):
        return invented_facts(s)
    values, sentence = _some_facts(s)
    names: dict[str, str] = {}
    for key in values:
        name = s.rng.choice(KEYS[key])
        names[key] = key if name in names.values() or s.chance(0.4) else name
    if len(set(names.values())) < len(names):
        names = {key: key for key in values}
    named = {names[key]: value for key, value in values.items()}
    if s.chance(0.15):
        pairs = _pairs(s, named)
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
