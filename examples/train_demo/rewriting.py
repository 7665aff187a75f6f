"""Rewriting: reverse, sort, spell, repeat, pick out, and fill a gap."""

from examples.train_demo.words import Item, Source, bank

BANK = bank("rewriting")


def some_words(s: Source, low: int, high: int) -> list[str]:
    words: list[str] = []
    count, share = s.rng.randint(low, high), s.rng.choice([0.0, 0.5, 1.0])
    while len(words) < count:
        word = s.plain_word(share)
        if word not in words:
            words.append(word)
    return words


def _listed(s: Source, words: list[str]) -> str:
    if len(words) > 1 and s.chance(0.15):
        return ", ".join(words[:-1]) + " and " + words[-1]
    return s.rng.choice([", ", ", ", " "]).join(words)


def _reverse(s: Source) -> Item:
    words = some_words(s, 2, 6)
    if s.chance(0.15):  # often sorted, so that reversing is not confused with sorting
        numbers = some_numbers(s)
        words = [str(n) for n in (sorted(numbers) if s.chance(0.5) else numbers)]
    ask = s.phrase(BANK["reverse"])
    return s.item("rewriting", ask.format(_listed(s, words)), ", ".join(words[::-1]))


def some_numbers(s: Source) -> list[int]:
    top = s.rng.choice([20, 100, 100, 199])
    return s.rng.sample(range(1, top + 1), s.rng.randint(3, 6))


def _sort(s: Source) -> Item:
    numbers, down = some_numbers(s), s.chance(0.4)
    listed = _listed(s, [str(n) for n in numbers])
    ask = s.phrase(BANK["sort_down" if down else "sort_up"])
    ordered = sorted(numbers, reverse=down)
    return s.item("rewriting", ask.format(listed), ", ".join(map(str, ordered)))


def _extreme(s: Source) -> Item:
    numbers, largest = some_numbers(s), s.chance(0.5)
    words = s.phrase("largest|biggest|highest|greatest" if largest else "smallest|lowest|least")
    ask = s.phrase(BANK["extreme"])
    listed = ", ".join(map(str, numbers))
    value = max(numbers) if largest else min(numbers)
    return s.item("rewriting", ask.format(w=words, l=listed), str(value))


def _spell(s: Source) -> Item:
    word = s.plain_word(0.5)
    if s.chance(0.2):
        word = s.rng.choice([s.name, s.city])()
    ask = s.phrase(BANK["spell"])
    mark = s.rng.choice(["", "", '"'])
    return s.item("rewriting", ask.format(f"{mark}{word}{mark}"), "-".join(word))


def _repeat(s: Source) -> Item:
    words = " ".join(some_words(s, 1, 6))
    ask = s.phrase(BANK["repeat"])
    return s.item("rewriting", ask.format(words), words)


def _nth(s: Source) -> Item:
    words = some_words(s, 3, 6)
    place = s.rng.choice([0, 1, 2, -1])
    which = {0: "first", 1: "second", 2: "third", -1: "last"}[place]
    ask = s.phrase(BANK["nth"])
    return s.item("rewriting", ask.format(w=which, l=_listed(s, words)), words[place])


def series(s: Source, gap: str) -> tuple[str, str]:
    """Return a series with a gap, and the whole series."""
    if s.chance(0.3):
        run = s.rng.choice([BANK["days"], BANK["months"], BANK["letters"]])
    else:
        step = s.rng.choice([1, 1, 2, 2, 3, 4, 5, 10, 20])
        first = s.rng.choice([step, s.rng.randint(1, 40)])
        run = [str(first + step * i) for i in range(8)]
    size = s.rng.randint(4, min(6, len(run)))
    start_at = s.rng.randint(0, len(run) - size)
    part = run[start_at : start_at + size]
    hidden = s.rng.randrange(1, size)
    return ", ".join(gap if i == hidden else w for i, w in enumerate(part)), ", ".join(part)


def _gap(s: Source) -> Item:
    gap = s.rng.choice(["___", "__", "...", "_", "[gap]", "____"])
    if s.chance(0.35):
        fact = s.rng.choice(BANK["facts"])
        start, rest = fact.split("[")
        _, end = rest.split("]")
        text, answer = start + gap + end, fact.replace("[", "").replace("]", "")
    else:
        text, answer = series(s, gap)
        if s.lower:
            answer = answer.lower()
    ask = s.phrase(BANK["fill"])
    return s.item("rewriting", ask.format(text), answer)


def rewriting(s: Source) -> Item:
    makers = [_reverse, _reverse, _sort, _sort, _extreme, _spell, _spell, _repeat, _nth, _gap]
    return s.rng.choice(makers)(s)
