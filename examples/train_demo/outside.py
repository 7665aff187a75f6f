"""Prompts that the demo cannot answer, and the one sentence that says so.

Prompts are built from word lists: questions about the world, chat, requests for texts and programs,
other languages, gibberish, and near misses of the tasks that the demo knows.
"""

from examples.train_demo.arithmetic import LIMIT, SIGNS
from examples.train_demo.json_extraction import _event, _order, _person, _pet, _trip
from examples.train_demo.rewriting import some_words
from examples.train_demo.words import COMMON, JOBS, THINGS, Item, Source, bank

BANK = bank("outside")
ANSWER = (
    "I only know arithmetic like 7*8, word problems, small Python functions, JSON from a sentence, "
    "sorting numbers, and reversing or spelling words."
)


# The letters in braces, and the words that stand for them; some letters have invented words too.
WORDS: dict[str, list[str]] = {
    "p": BANK["nouns"], "f": BANK["famous"], "t": BANK["topics"], "m": COMMON, "x": THINGS,
    "v": BANK["verbs"], "a": BANK["adjectives"], "q": BANK["properties"], "h": BANK["chores"],
    "l": BANK["languages"], "g": BANK["texts"], "j": JOBS, "d": BANK["deeds"],
    "P": BANK["programs"],
}  # fmt: skip


def _word(s: Source, letter: str) -> str:
    if letter == "k":
        return s.word_of(BANK["countries"]) if s.chance(0.7) else s.invented().capitalize()
    if letter == "c":
        return s.city()
    if letter == "n":
        return s.plain_word(0.7)
    return s.invented() if letter == "w" else s.word_of(WORDS[letter])


def _filled(s: Source, template: str) -> str:
    """Return a template with its letters replaced, independently at each place."""
    out, rest = "", template
    while "{" in rest:
        before, _, rest = rest.partition("{")
        letter, _, rest = rest.partition("}")
        word = _word(s, letter)
        if letter in "kcfwnmx":
            s.drawn.add(word)
        out += before + word
    return out + rest


def _gibberish(s: Source) -> str:
    kind = s.rng.randrange(4)
    if kind == 0:
        return "".join(s.rng.choices("abcdefghijklmnopqrstuvwxyz", k=s.rng.randint(2, 14)))
    if kind == 1:
        return " ".join(s.invented() for _ in range(s.rng.randint(1, 7)))
    if kind == 2:
        return (
            "".join(
                s.rng.choices("abc !?.,;:-_#*+/()[]{}<>=&%$0123456789xyz", k=s.rng.randint(1, 16))
            ).strip()
            or "?"
        )
    return " ".join(s.plain_word(0.9) for _ in range(s.rng.randint(1, 8)))


def _calculation(s: Source) -> str:
    """Return a calculation that the demo never learnt: large, below zero, or in brackets."""
    rng, sign = s.rng, s.rng.choice("+-*/")
    kind = rng.randrange(5)
    if kind == 0:
        a, b, c = (rng.randint(2, 12) for _ in range(3))
        inner = rng.choice([f"{b}+{c}", f"{b} + {c}", f"{b + c}-{c}", f"{b + c} - {c}"])
        return rng.choice(
            [f"{a}*({inner})", f"{a} * ({inner})", f"({inner})*{a}", f"{a}-({inner})"]
        )
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
    kind = s.rng.choices(range(8), [2, 1, 1, 1, 1, 1, 3, 1])[0]
    if kind == 0:
        return s.phrase("What is {}?|{}|Calculate {}.|How much is {}?|{} = ?|What's {}?").format(
            _calculation(s)
        )
    if kind == 1:  # facts without a question
        return s.rng.choice([_person, _order, _event, _pet, _trip])(s).sentence
    if kind == 2:
        return s.phrase(BANK["facts"]).format(
            n=s.name(),
            m=s.name(),
            a=s.rng.randint(2, 99),
            b=s.rng.randint(2, 12),
            x=s.thing(),
            c=s.city(),
        )
    if kind == 3:
        return s.phrase(BANK["unknown"]).format(
            n=s.name(), x=s.thing(), c=s.city(), w=s.plain_word(0.7), j=s.job()
        )
    if kind == 4:
        return s.phrase(BANK["calculations"]).format(
            a=s.rng.randint(2, 199), b=s.rng.randint(2, 199)
        )
    if kind == 5:
        return s.phrase(BANK["about_tasks"]).format(w=s.plain_word(0.8), x=s.thing())
    if kind == 6:
        return s.phrase(BANK["words"]).format(
            w=s.plain_word(0.5), v=s.plain_word(0.5), u=", ".join(some_words(s, 2, 5))
        )
    return _filled(s, s.phrase(BANK["statements"])) + " " + _filled(s, s.phrase(BANK["questions"]))


def outside(s: Source) -> Item:
    kind = s.rng.random()
    if kind < 0.29:
        text = _filled(s, s.phrase(BANK["questions"]))
    elif kind < 0.46:
        text = _filled(s, s.phrase(BANK["requests"]))
    elif kind < 0.53:
        text = _filled(s, s.phrase(BANK["statements"]))
    elif kind < 0.60:
        text = s.word_of(BANK["chat"])
        if s.chance(0.3):
            text = f"{text} {s.word_of(BANK['chat'])}"
    elif kind < 0.64:
        text = s.word_of(BANK["foreign"])
    elif kind < 0.72:
        text = _gibberish(s)
    else:
        text = _near_miss(s)
    return s.item("outside", text, ANSWER)
