"""The sentences of word problems: their verbs agree with the subject and change tense."""

import re

from examples.train_demo.words import Item, Person, Source, bank

BANK = bank("sentences")
GAIN, LOSS, PLACES = BANK["gain"], BANK["loss"], BANK["places"]
PAST: dict[str, str] = BANK["past"]


def tense(text: str, past: bool) -> str:
    """Put `text` into the past if wanted; questions keep the infinitive after do, does and did."""
    if not past:
        return text
    return re.sub(r"[A-Za-z]+", lambda m: PAST.get(m[0], m[0]), text)


def fill(s: Source, options: list[str], past: bool, **values: object) -> str:
    """Return a phrasing with its values; verbs change tense before names are filled in."""
    text = tense(s.phrase(options), past)
    text = agree(text.format(**values))
    return text[0].upper() + text[1:]


def agree(text: str) -> str:
    """Make verbs agree with I and we: have instead of has."""

    def base(match: re.Match[str]) -> str:
        subject, verb = match[1], match[2]
        plain = {"has": "have", "does": "do", "is": "are", "goes": "go", "was": "were"}.get(verb)
        if plain is None:
            plain = verb[:-1] if verb.endswith("s") and verb not in ("is", "was") else verb
        if subject == "I" and verb in ("is", "was"):
            plain = {"is": "am", "was": "was"}[verb]
        return f"{subject} {plain}"

    text = re.sub(r"\b(I|[Ww]e) ([a-z]+)\b", base, text)
    for verb, plain in (("does", "do"), ("has", "have")):
        text = re.sub(rf"\b{verb} (I|we)\b", rf"{plain} \1", text)
    text = re.sub(r"\b(is|are) I\b", "am I", text)
    return re.sub(r"\bis we\b", "are we", text)


def solved(s: Source, question: str, steps: list[str], result: int) -> Item:
    return s.item("math", question, " ".join(steps) + f" The answer is {result}.")


def two_people(s: Source) -> tuple[Person, str]:
    return s.person(), s.name()
