"""Other words for what the phrasings say: training questions only, so that a model reads more ways.

A rewording keeps the question's meaning and answer. Names, things and words of the answer stay.
"""

import re

from examples.train_demo.words import Item, Source, bank

# What may stand for which words. An empty alternative leaves them out.
ALTERNATIVES = bank("rewording")
LONGEST_FIRST = sorted(ALTERNATIVES, key=len, reverse=True)
PATTERN = re.compile(rf"\b(?:{'|'.join(LONGEST_FIRST)})\b(?![:=])", re.IGNORECASE)


def _may_change(source: Source, words: str, spared: set[str]) -> bool:
    """Return whether to offer the words for a rewording; `spared` is in lower case."""
    article = words.lower() in ("the", "a")  # so frequent that a third of them is enough
    return not spared & set(words.lower().split()) and not (article and source.chance(0.7))


def reworded(source: Source, item: Item) -> Item:
    """Return the item with one to three of its words replaced, if the answer has none of them."""
    spared = {w for text in (item.answer, *source.drawn) for w in re.findall(r"\w+", text.lower())}
    if item.task == "outside":
        spared.clear()
    found = [m for m in PATTERN.finditer(item.question) if _may_change(source, m[0], spared)]
    chosen = source.rng.sample(found, min(len(found), source.rng.choice([1, 1, 2, 3])))
    question = item.question
    for match in sorted(chosen, key=lambda m: -m.start()):
        new: str = source.rng.choice(ALTERNATIVES[match[0].lower()])
        if match[0][0].isupper() and not match[0].isupper():
            new = new[:1].upper() + new[1:]
        question = question[: match.start()] + new + question[match.end() :]
    question = re.sub(" +", " ", question).strip()
    if not re.search(r"\w", question):
        return item
    first = item.key.split(" / ")[0] + " / " if item.before else ""
    return item._replace(question=question, key=first + source.key(question))
