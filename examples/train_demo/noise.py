"""How people type: typos, missing punctuation, superfluous sentences."""

from examples.train_demo.words import Source, bank

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
BANK = bank("noise")


def typo(source: Source, word: str) -> str:
    """Swap, drop, double or replace one letter after the first."""
    rng = source.rng
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    return word[:at] + rng.choice(ALPHABET) + word[at + 1 :]


def with_typos(source: Source, text: str, spared: set[str]) -> str:
    """Misspell one or two words, except those that the answer copies (`spared`)."""
    words = text.split(" ")
    places = [
        i for i, w in enumerate(words) if len(w) > 3 and w.isalpha() and w.lower() not in spared
    ]
    for i in source.rng.sample(places, min(len(places), source.rng.choice([1, 1, 2]))):
        words[i] = typo(source, words[i])
    return " ".join(words)


def noisy(source: Source, question: str, spared: set[str], ending: bool) -> str:
    """Return the question as typed in a hurry; `ending` says whether words may follow it."""
    if source.chance(0.10):
        question = with_typos(source, question, spared)
    if question.split(" ")[0] in BANK["commands"] and source.chance(0.15):
        question = source.phrase(BANK["requests"]).format(question[0].lower() + question[1:])
    bare = question.rstrip(".?!")
    if ending and source.chance(0.10):
        question = (
            bare + source.phrase(BANK["closers"]) + source.rng.choice(["", question[len(bare) :]])
        )
    elif source.chance(0.15):
        question = bare or question
    elif source.chance(0.03) and question[-1] == "?":
        question += "??"
    if source.chance(0.10):
        names = {"I", *(word for name in source.drawn for word in name.split())}
        is_name = question.split()[0].strip(",.:") in names  # an answer may copy it
        first = question if is_name else question[0].lower() + question[1:]
        question = source.phrase(BANK["openers"]) + source.rng.choice([first, question])
    elif source.chance(0.12):
        question = source.phrase(BANK["before"]) + " " + question
    if ending and source.chance(0.06):
        question = question + " " + source.phrase(BANK["after"])
    return question.lower() if source.lower else question
