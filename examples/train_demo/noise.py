"""How people write: in other words than any phrasing has, with typos, and with more or fewer words.

A rewording, for training questions only, keeps the question's meaning and answer. Names, things and
words of the answer stay.
"""

import re

from examples.train_demo.words import Item, Source, bank, words_of

BANK = bank("noise")
# What may stand for which words. An empty alternative leaves them out.
ALTERNATIVES: dict[str, list[str]] = BANK["alternatives"]
LONGEST_FIRST = sorted(ALTERNATIVES, key=len, reverse=True)
PATTERN = re.compile(rf"\b(?:{'|'.join(LONGEST_FIRST)})\b(?![:=])", re.IGNORECASE)


def reworded(s: Source, item: Item) -> Item:
    """Return the item with one to three of its words replaced, if the answer has none of them."""
    spared = {word for text in (item.answer, *s.drawn) for word in words_of(text)}
    if item.task == "outside":
        spared.clear()

    def may_change(words: str) -> bool:
        article = words in ("the", "a")  # so frequent that a third of them is enough
        return not spared & set(words.split()) and not (article and s.chance(0.7))

    found = [m for m in PATTERN.finditer(item.question) if may_change(m[0].lower())]
    chosen = s.rng.sample(found, min(len(found), s.rng.choice([1, 1, 2, 3])))
    question = item.question
    for match in sorted(chosen, key=lambda m: -m.start()):
        new = s.rng.choice(ALTERNATIVES[match[0].lower()])
        if match[0][0].isupper() and not match[0].isupper():
            new = new[:1].upper() + new[1:]
        question = question[: match.start()] + new + question[match.end() :]
    question = re.sub(" +", " ", question).strip()
    if not re.search(r"\w", question):
        return item
    first = item.key.split(" / ")[0] + " / " if item.before else ""
    return item._replace(question=question, key=first + s.key(question))


def _typo(s: Source, word: str) -> str:
    """Swap, drop, double or replace one letter after the first."""
    at = s.rng.randrange(1, len(word) - 1)
    kind = s.rng.choice(["swap", "drop", "double", "replace"])
    before, letter, after = word[:at], word[at], word[at + 1 :]
    if kind == "swap":
        return before + after[0] + letter + after[1:]
    if kind == "drop":
        return before + after
    if kind == "double":
        return before + letter + letter + after
    return before + s.rng.choice("abcdefghijklmnopqrstuvwxyz") + after


def _with_typos(s: Source, text: str, spared: set[str]) -> str:
    """Misspell one or two words, except those that the answer copies (`spared`)."""
    words = text.split(" ")
    places = [
        i for i, w in enumerate(words) if len(w) > 3 and w.isalpha() and w.lower() not in spared
    ]
    for i in s.rng.sample(places, min(len(places), s.rng.choice([1, 1, 2]))):
        words[i] = _typo(s, words[i])
    return " ".join(words)


def noisy(s: Source, question: str, spared: set[str], ending: bool) -> str:
    """Return the question as typed in a hurry; `ending` says whether words may follow it."""
    if s.chance(0.10):
        question = _with_typos(s, question, spared)
    if question.split(" ")[0] in BANK["commands"] and s.chance(0.15):
        question = s.phrase(BANK["requests"]).format(question[0].lower() + question[1:])
    bare = question.rstrip(".?!")
    if ending and s.chance(0.10):
        question = bare + s.phrase(BANK["closers"]) + s.rng.choice(["", question[len(bare) :]])
    elif s.chance(0.15):
        question = bare or question
    elif s.chance(0.03) and question[-1] == "?":
        question += "??"
    if s.chance(0.10):
        names = {"I", *(word for name in s.drawn for word in name.split())}
        is_name = question.split()[0].strip(",.:") in names  # an answer may copy it
        first = question if is_name else question[0].lower() + question[1:]
        question = s.phrase(BANK["openers"]) + s.rng.choice([first, question])
    elif s.chance(0.12):
        question = s.phrase(BANK["before"]) + " " + question
    if ending and s.chance(0.06):
        question = question + " " + s.phrase(BANK["after"])
    return question.lower() if s.lower else question
