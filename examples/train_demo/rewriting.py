"""Rewriting: reverse, sort, spell, repeat, pick out, and fill a gap."""

import re

from examples.train_demo.words import DAYS, Item, Source, bank

BANK = bank("rewriting")


def _listed(s: Source, words: list[str]) -> str:
    if len(words) > 1 and s.chance(0.15):
        return ", ".join(words[:-1]) + " and " + words[-1]
    return s.rng.choice([", ", ", ", " "]).join(words)


def some_numbers(s: Source) -> list[int]:
    top = s.rng.choice([20, 100, 100, 199])
    return s.rng.sample(range(1, top + 1), s.rng.randint(3, 6))


def edited_list(words: list[str], edit: str, word: str) -> list[str]:
    """Return the list after an edit; `word` is added or removed."""
    return {
        "reverse": words[::-1], "first": words[:1], "last": words[-1:], "add": [*words, word],
        "without": [w for w in words if w != word],
    }[edit]  # fmt: skip


def series(s: Source, gap: str) -> tuple[str, str]:
    """Return a series with a gap, and the whole series."""
    if s.chance(0.3):
        run = s.rng.choice([DAYS, BANK["months"], BANK["letters"]])
    else:
        step = s.rng.choice([1, 1, 2, 2, 3, 4, 5, 10, 20])
        first = s.rng.choice([step, s.rng.randint(1, 40)])
        run = [str(first + step * i) for i in range(8)]
    size = s.rng.randint(4, min(6, len(run)))
    start_at = s.rng.randint(0, len(run) - size)
    part = run[start_at : start_at + size]
    hidden = s.rng.randrange(1, size)
    return ", ".join(gap if i == hidden else w for i, w in enumerate(part)), ", ".join(part)


Rewriting = tuple[str, str]  # a question and its answer


def _reverse(s: Source) -> Rewriting:
    words = s.words(2, 6)
    if s.chance(0.15):  # often sorted, so that reversing is not confused with sorting
        numbers = some_numbers(s)
        words = [str(n) for n in (sorted(numbers) if s.chance(0.5) else numbers)]
    ask = s.phrase(BANK["reverse"])
    return ask.format(_listed(s, words)), ", ".join(words[::-1])


def _sort(s: Source) -> Rewriting:
    numbers, down = some_numbers(s), s.chance(0.4)
    listed = _listed(s, [str(n) for n in numbers])
    ordered = sorted(numbers, reverse=down)
    ask = s.phrase(BANK["sort_down" if down else "sort_up"])
    return ask.format(listed), ", ".join(map(str, ordered))


def _extreme(s: Source) -> Rewriting:
    numbers, largest = some_numbers(s), s.chance(0.5)
    which = s.phrase("largest|biggest|highest|greatest" if largest else "smallest|lowest|least")
    value = max(numbers) if largest else min(numbers)
    listed = ", ".join(map(str, numbers))
    return s.phrase(BANK["extreme"]).format(w=which, l=listed), str(value)


def _spell(s: Source) -> Rewriting:
    word = s.plain_word(0.5)
    if s.chance(0.2):
        word = s.rng.choice([s.name, s.city])()
    ask, mark = s.phrase(BANK["spell"]), s.rng.choice(["", "", '"'])
    return ask.format(f"{mark}{word}{mark}"), "-".join(word)


def _repeat(s: Source) -> Rewriting:
    words = " ".join(s.words(1, 6))
    return s.phrase(BANK["repeat"]).format(words), words


def _nth(s: Source) -> Rewriting:
    words = s.words(3, 6)
    which, place = s.rng.choice([("first", 0), ("second", 1), ("third", 2), ("last", -1)])
    ask = s.phrase(BANK["nth"])
    return ask.format(w=which, l=_listed(s, words)), words[place]


def _gap(s: Source) -> Rewriting:
    gap = s.rng.choice(["___", "__", "...", "_", "[gap]", "____"])
    if s.chance(0.35):
        before, hidden, after = re.split(r"[\[\]]", s.rng.choice(BANK["facts"]))
        text, answer = before + gap + after, before + hidden + after
    else:
        text, answer = series(s, gap)
        answer = answer.lower() if s.lower else answer
    return s.phrase(BANK["fill"]).format(text), answer


def rewriting(s: Source) -> Item:
    makers = [_reverse, _reverse, _sort, _sort, _extreme, _spell, _spell, _repeat, _nth, _gap]
    question, answer = s.rng.choice(makers)(s)
    return s.item("rewriting", question, answer)
