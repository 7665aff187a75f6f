"""Prompts that the demo cannot answer, and the one sentence that says so.

Prompts are built from word lists: questions about the world, chat, requests for texts and programs,
other languages, gibberish, and near misses of the tasks that the demo knows.
"""

import re

from examples.train_demo.arithmetic import LIMIT, SIGNS
from examples.train_demo.json_extraction import facts
from examples.train_demo.words import COMMON, JOBS, THINGS, Item, Source, bank

BANK = bank("outside")
ANSWER = (
    "I only know arithmetic like 7*8, word problems, small Python functions, JSON from a sentence, "
    "sorting numbers, and reversing or spelling words."
)
# The letters in braces, and the words that stand for them.
WORDS: dict[str, list[str]] = {
    **{letter: BANK[name] for letter, name in BANK["letters"].items()},
    "m": COMMON, "x": THINGS, "j": JOBS,
}  # fmt: skip


def _word(s: Source, letter: str) -> str:
    if letter == "k":
        return s.word_of(BANK["countries"]) if s.chance(0.7) else s.invented().capitalize()
    if letter == "c":
        return s.city()
    if letter == "n":
        return s.plain_word(0.7)
    return s.invented() if letter == "w" else s.word_of(WORDS[letter])


def _filled(s: Source, kind: str) -> str:
    """Return a template with its letters replaced, independently at each place."""

    def fill(match: re.Match[str]) -> str:
        word = _word(s, match[1])
        if match[1] in "kcfwnmx":
            s.drawn.add(word)
        return word

    return re.sub(r"\{(\w)\}", fill, s.phrase(BANK[kind]))


def _gibberish(s: Source) -> str:
    kind = s.rng.choice(["letters", "invented", "signs", "words"])
    if kind == "letters":
        return "".join(s.rng.choices("abcdefghijklmnopqrstuvwxyz", k=s.rng.randint(2, 14)))
    if kind == "invented":
        return " ".join(s.invented() for _ in range(s.rng.randint(1, 7)))
    if kind == "signs":
        signs = "abc !?.,;:-_#*+/()[]{}<>=&%$0123456789xyz"
        return "".join(s.rng.choices(signs, k=s.rng.randint(1, 16))).strip() or "?"
    return " ".join(s.plain_word(0.9) for _ in range(s.rng.randint(1, 8)))


def _calculation(s: Source) -> str:
    """Return a calculation that the demo never learnt: large, below zero, or in brackets."""
    rng, sign = s.rng, s.rng.choice("+-*/")
    kind = rng.randrange(5)
    if kind == 0:
        a, b, c = (rng.randint(2, 12) for _ in range(3))
        inner = rng.choice([f"{b}+{c}", f"{b} + {c}", f"{b + c}-{c}", f"{b + c} - {c}"])
        around = rng.choice(["{a}*({i})", "{a} * ({i})", "({i})*{a}", "{a}-({i})"])
        return around.format(a=a, i=inner)
    if kind == 1:
        sign, a = "+", rng.randint(10, 199)
        b = rng.randint(max(10, LIMIT + 5 - a), 199)
    elif kind == 2:
        sign, a = "-", rng.randint(2, 60)
        b = a + rng.randint(2, 90)
    else:
        a, b = rng.randint(200, 99999), rng.randint(13, 9999)
    return f"{a} {s.rng.choice([sign, SIGNS[sign][0]])} {b}"


def _near_miss(s: Source) -> str:
    """Return an incomplete task, or one that the demo never learnt."""
    kinds = "calculation", "no question", *BANK["near_misses"], "after a statement"
    (kind,) = s.rng.choices(kinds, [2, 1, 1, 1, 1, 1, 3, 1])
    if kind == "calculation":
        ask = s.phrase("What is {}?|{}|Calculate {}.|How much is {}?|{} = ?|What's {}?")
        return ask.format(_calculation(s))
    if kind == "no question":
        return facts(s, ["person", "order", "event", "pet", "trip"]).sentence
    if kind == "after a statement":
        return f"{_filled(s, 'statements')} {_filled(s, 'questions')}"
    near = BANK["near_misses"][kind]
    return s.phrase(near["said"]).format(**s.values(near["values"]))


def outside(s: Source) -> Item:
    kinds = "questions", "requests", "statements", "chat", "foreign", "gibberish", "near miss"
    (kind,) = s.rng.choices(kinds, cum_weights=(0.29, 0.46, 0.53, 0.60, 0.64, 0.72, 1.0))
    if kind == "gibberish":
        text = _gibberish(s)
    elif kind == "near miss":
        text = _near_miss(s)
    elif kind in ("chat", "foreign"):
        text = s.word_of(BANK[kind])
        if kind == "chat" and s.chance(0.3):
            text = f"{text} {s.word_of(BANK['chat'])}"
    else:
        text = _filled(s, kind)
    return s.item("outside", text, ANSWER)
