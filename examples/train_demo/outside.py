"""Prompts that the demo cannot answer, and the one sentence that says so.

Prompts are built from word lists: questions about the world, chat, requests for texts and programs,
other languages, gibberish, and near misses of the tasks that the demo knows.
"""

from collections.abc import Callable

from examples.train_demo.arithmetic import LIMIT, SIGNS
from examples.train_demo.json_extraction import _event, _order, _person, _pet, _trip
from examples.train_demo.outside_phrasings import (
    ADJECTIVES,
    CHAT,
    CHORES,
    COUNTRIES,
    DEEDS,
    FAMOUS,
    FOREIGN,
    LANGUAGES,
    NOUNS,
    PROGRAMS,
    PROPERTIES,
    QUESTIONS,
    REQUESTS,
    STATEMENTS,
    TEXTS,
    TOPICS,
    VERBS,
)
from examples.train_demo.rewriting import some_words
from examples.train_demo.words import COMMON, JOBS, THINGS, Item, Source

ANSWER = (
    "I only know arithmetic like 7*8, word problems, small Python functions, JSON from a sentence, "
    "sorting numbers, and reversing or spelling words."
)


def _filled(s: Source, template: str) -> str:
    """Return a template with its letters replaced, independently at each place."""
    fill: dict[str, Callable[[], str]] = {
        "p": lambda: s.word_of(NOUNS),
        "k": lambda: s.word_of(COUNTRIES) if s.chance(0.7) else s.invented().capitalize(),
        "c": s.city,
        "f": lambda: s.word_of(FAMOUS),
        "t": lambda: s.word_of(TOPICS),
        "n": lambda: s.plain_word(0.7),
        "m": lambda: s.word_of(COMMON),
        "x": lambda: s.word_of(THINGS),
        "v": lambda: s.word_of(VERBS),
        "a": lambda: s.word_of(ADJECTIVES),
        "q": lambda: s.word_of(PROPERTIES),
        "h": lambda: s.word_of(CHORES),
        "l": lambda: s.word_of(LANGUAGES),
        "w": s.invented,
        "g": lambda: s.word_of(TEXTS),
        "j": lambda: s.word_of(JOBS),
        "d": lambda: s.word_of(DEEDS),
        "P": lambda: s.word_of(PROGRAMS),
    }
    out, rest = "", template
    while "{" in rest:
        before, _, rest = rest.partition("{")
        letter, _, rest = rest.partition("}")
        word = fill[letter]()
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
        return s.phrase(
            "{n} has {a} {x}.|There are {a} {x} in {c}.|{n} gives {a} {x} to {m}.|"
            "{n} buys {a} {x} for {b} dollars each.|{n} is {a} years old."
        ).format(
            n=s.name(),
            m=s.name(),
            a=s.rng.randint(2, 99),
            b=s.rng.randint(2, 12),
            x=s.thing(),
            c=s.city(),
        )
    if kind == 3:
        return s.phrase(
            "How many {x} are there in {c}?|How many people live in {c}?|"
            "How many {x} does {n} have?|How much does a {w} cost?|How old is {n}?|"
            "How tall is {n}?|Where does {n} live?|"
            "Who is {n}?|What is {n}?|When was {n} born?|"
            "How many {x} are in a {w}?|What does {n} do?|Is {n} a {j}?"
        ).format(n=s.name(), x=s.thing(), c=s.city(), w=s.plain_word(0.7), j=s.job())
    if kind == 4:
        return s.phrase(
            "What is the square root of {a}?|What is {a} percent of {b}?|"
            "Is {a} prime?|What is the factorial of {a}?|What is pi?|"
            "Convert {a} miles to kilometers.|What is {a} in binary?|"
            "Solve x + {a} = {b}|What is the sine of {a}?|Integrate x squared.|"
            "Factor {a}.|What is {a} to the power of {b}?|Round {a}.{b}|"
            "What year was {a} years ago?|Is {a} larger than {b}?|Count to {a}.|"
            "{a}|{a} {b}|What comes after infinity?|"
            "Tell me a number|Roll a die|What is log {a}?"
        ).format(a=s.rng.randint(2, 199), b=s.rng.randint(2, 199))
    if kind == 5:
        return s.phrase(
            "What is JSON?|Explain JSON.|Give me an example of JSON.|"
            "Write a JSON schema for a {w}.|Convert this JSON to YAML.|"
            "Is JSON better than XML?|Who invented JSON?|Write XML for a {w}.|"
            "What is a function?|What is a list in Python?|Why is Python slow?|"
            "Who invented Python?|Sort my {w}.|Reverse the car.|Spell check this.|"
            "Repeat yourself.|Fill the bottle.|"
            "What is arithmetic?|What is a word problem?|Give me a word problem.|"
            "Calculate something.|Teach me math.|Explain addition.|Write a list.|"
            "Extract the {w}.|Make a table of {x}."
        ).format(w=s.plain_word(0.8), x=s.thing())
    if kind == 6:
        return s.phrase(
            "Uppercase this: {w} {v}|Count the letters in {w}.|"
            "How many letters has {w}?|Is {w} a palindrome?|What rhymes with {w}?|"
            "Sort the words {w}, {v} by length.|Give the plural of {w}.|"
            "Is {w} a word?|Make an anagram of {w}.|Encode {w} in base64.|Hash {w}.|"
            "Sort these words: {u}|Sort: {u}|Sort {u}.|Sort the words {u}.|Alphabetically: {u}|"
            "Put {u} in alphabetical order.|Sort {u} from A to Z.|Alphabetize {u}.|"
            "Order these words alphabetically: {u}|Can you sort {u}?|"
            "Spell {w} backwards.|Write the word {w} backwards.|Reverse the word {w}.|"
            "Reverse the letters of {w}.|What is {w} spelled backwards?"
        ).format(w=s.plain_word(0.5), v=s.plain_word(0.5), u=", ".join(some_words(s, 2, 5)))
    return _filled(s, s.phrase(STATEMENTS)) + " " + _filled(s, s.phrase(QUESTIONS))


def outside(s: Source) -> Item:
    kind = s.rng.random()
    if kind < 0.29:
        text = _filled(s, s.phrase(QUESTIONS))
    elif kind < 0.46:
        text = _filled(s, s.phrase(REQUESTS))
    elif kind < 0.53:
        text = _filled(s, s.phrase(STATEMENTS))
    elif kind < 0.60:
        text = s.word_of(CHAT)
        if s.chance(0.3):
            text = f"{text} {s.word_of(CHAT)}"
    elif kind < 0.64:
        text = s.word_of(FOREIGN)
    elif kind < 0.72:
        text = _gibberish(s)
    else:
        text = _near_miss(s)
    return s.item("outside", text, ANSWER)
