"""Words and phrasings, and the source from which generators draw them.

Names, things and phrasings are split by hash: one entity in eight and one phrasing in ten are never
used in training. Most entities are invented words, so that a model has to copy what it reads.
"""

import functools
import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


@functools.cache
def bank(name: str) -> dict[str, Any]:
    """Return the phrasings and words of a module: phrases/NAME.json."""
    texts = Path(__file__).parent.joinpath("phrases", f"{name}.json").read_text("utf-8")
    parts: dict[str, Any] = json.loads(texts)
    return parts


BANK = bank("words")
CITIES: list[str] = BANK["cities"]
JOBS: list[str] = BANK["jobs"]
THINGS: list[str] = BANK["things"]
COMMON: list[str] = BANK["common"]
EVENTS: list[str] = BANK["events"]
ANIMALS: list[str] = BANK["animals"]
COLORS: list[str] = BANK["colors"]
DAYS: list[str] = BANK["days"]
Values = dict[str, str | int]


class Item(NamedTuple):
    """A question, its answer, and the turns before it.

    `system` shows functions that may be called; `role` asks: the user, or a tool with its result.
    `key` is the question before noise, with names and things blanked: items with equal keys are
    near-duplicates.
    """

    task: str
    question: str
    answer: str
    key: str = ""
    before: tuple[tuple[str, str], ...] = ()
    system: str = ""
    role: str = "user"


def bucket(text: str, buckets: int) -> int:
    return int.from_bytes(hashlib.sha256(text.lower().encode()).digest()[:4], "big") % buckets


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def is_held_out_word(word: str) -> bool:
    return bucket("word " + word, 8) == 0


def is_held_out_phrase(phrase: str) -> bool:
    return bucket("phrase " + phrase, 10) == 0


class Person(NamedTuple):
    name: str
    she: str
    her: str

    def values(self) -> dict[str, Any]:
        """Return the names and pronouns that phrasings have for the person."""
        return self._asdict() | {"She": self.she.capitalize()}


class Source:
    """Draws words and phrasings for one item, from trained or held-out ones."""

    def __init__(self, rng: random.Random, entities: bool, phrasings: bool) -> None:
        """Draw held-out words if `entities`, and held-out phrasings if `phrasings`."""
        self.rng, self.entities, self.phrasings = rng, entities, phrasings
        self.lower = False
        self.used_held_out_phrase = False
        self.drawn: set[str] = set()

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def phrase(self, options: str | Sequence[str]) -> str:
        """Return one of the phrasings, given as a sequence or separated by bars."""
        texts = options.split("|") if isinstance(options, str) else list(options)
        trained = [t for t in texts if not is_held_out_phrase(t)]
        held = [t for t in texts if is_held_out_phrase(t)]
        if self.phrasings and held:
            self.used_held_out_phrase = True
            return self.rng.choice(held)
        return self.rng.choice(trained or texts)

    def word_of(self, words: Sequence[str]) -> str:
        """Return one of the words of a list; a list too short for a split is used whole."""
        allowed = [w for w in words if is_held_out_word(w) == self.entities] or list(words)
        return self.rng.choice(allowed)

    def invented(self, syllables: int = 0) -> str:
        """Return a word that does not exist."""
        rng = self.rng
        while True:
            parts = []
            for _ in range(syllables or rng.choice([1, 1, 2, 2, 2, 2, 2, 3])):
                parts.append(rng.choice(BANK["onsets"]) if rng.random() < 0.9 else "")
                parts.append(rng.choice(BANK["vowels"]))
                parts.append(rng.choice(BANK["codas"]) if rng.random() < 0.4 else "")
            word = "".join(parts)
            if rng.random() < 0.06:
                word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 7)))
            if 3 <= len(word) <= 11 and is_held_out_word(word) == self.entities:
                return word

    def _entity(self, words: Sequence[str], share: float, ending: str = "") -> str:
        capital = words[0][0].isupper()
        for _ in range(99):
            word = self.word_of(words) if self.chance(share) else self.invented() + ending
            word = word.capitalize() if capital else word
            if word.lower() not in {w.lower() for w in self.drawn}:
                break
        word = word.lower() if self.lower else word
        self.drawn.add(word)
        return word

    def name(self) -> str:
        return self._entity(BANK["first_names"], 0.4)

    def full_name(self) -> str:
        if self.chance(0.4):
            return f"{self.name()} {self._entity(BANK['surnames'], 0.3)}"
        return self.name()

    def person(self) -> Person:
        """Return a person, usually with a name, else I, we, or a role."""
        kind = self.rng.random()
        if kind < 0.12:
            word, her = self.rng.choice([("I", "me"), ("I", "me"), ("we", "us")])
            return Person(word, word, her)
        if kind < 0.22:
            she = self.chance(0.5)
            word = self.rng.choice(
                [f"the {self.word_of(BANK['roles'])}", f"my {self.word_of(BANK['relatives'])}"]
            )
            return Person(word, "she" if she else "he", "her" if she else "him")
        name = self.name()
        if kind < 0.26:
            name = self.rng.choice(["Mr. ", "Mrs. ", "my friend "]) + name
        last = name.split()[-1].capitalize()
        she = last in BANK["women"] if last in BANK["first_names"] else self.chance(0.5)
        return Person(name, "she" if she else "he", "her" if she else "him")

    def city(self) -> str:
        return self._entity(CITIES, 0.4)

    def job(self) -> str:
        return self._entity(JOBS, 0.6)

    def thing(self) -> str:
        thing = self._entity(THINGS, 0.5, "s")
        return f"{self.rng.choice(BANK['adjectives'])} {thing}" if self.chance(0.08) else thing

    def plain_word(self, share: float = 0.4) -> str:
        """Return a word in lower case that is not an entity: it is the question's content."""
        words = THINGS if self.chance(0.2) else COMMON
        return self.word_of(words) if self.chance(share) else self.invented()

    def words(self, low: int, high: int) -> list[str]:
        """Return distinct plain words."""
        words: list[str] = []
        count, share = self.rng.randint(low, high), self.rng.choice([0.0, 0.5, 1.0])
        while len(words) < count:
            word = self.plain_word(share)
            if word not in words:
                words.append(word)
        return words

    def _day(self) -> str:
        day = self.rng.choice(DAYS)
        return day.lower() if self.lower else day

    def values(self, kinds: dict[str, str]) -> Values:
        """Draw a value of each kind in turn: "2-99" is a number, "word 0.7" has a share."""
        return {key: self._value(*kind.split()) for key, kind in kinds.items()}

    def _value(self, kind: str, share: str = "0.4") -> str | int:
        if kind[0].isdigit():
            low, high = kind.split("-")
            return self.rng.randint(int(low), int(high))
        makers: dict[str, Callable[[], str]] = {
            "name": self.name, "full_name": self.full_name, "city": self.city, "job": self.job,
            "thing": self.thing, "day": self._day,
            "event": lambda: self.word_of(EVENTS),
            "animal": lambda: self.word_of(ANIMALS),
            "color": lambda: self.rng.choice(COLORS),
            "word": lambda: self.plain_word(float(share)),
            "words": lambda: ", ".join(self.words(2, 5)),
            "text": lambda: " ".join(
                self.plain_word() for _ in range(self.rng.choice([1, 2, 2, 3]))
            ),
        }  # fmt: skip
        return makers[kind]()

    def key(self, question: str) -> str:
        """Return the question in lower case with names and things blanked."""
        for word in sorted(self.drawn, key=len, reverse=True):
            blank = " ".join("_" for _ in word.split())
            question = re.sub(rf"\b{re.escape(word)}\b", blank, question, flags=re.IGNORECASE)
        return question.lower()

    def item(self, task: str, question: str, answer: str, **rest: object) -> Item:
        """Return the finished item; its question is in lower case if this source is."""
        key = self.key(question)
        return Item(task, question.lower() if self.lower else question, answer, key, **rest)  # type: ignore[arg-type]
