"""Short exercises without phrasings, for drills: what to do and the answer, in few tokens."""

from collections.abc import Callable

from examples.train_demo.json_extraction import compact, edited, invented_facts
from examples.train_demo.rewriting import edited_list, series, some_numbers
from examples.train_demo.words import Source, Values, is_held_out_word

Exercise = tuple[str, str]


def exercise(s: Source, pieces: list[str]) -> Exercise:
    """Return a question and its answer; `pieces` are the tokenizer's, to be spelled."""
    if s.chance(0.2):
        return _spell(s, pieces)
    return s.rng.choice(MAKERS)(s)


def _spell(s: Source, pieces: list[str]) -> Exercise:
    """Spell pieces put together: no text shows the letters of a piece."""
    word = ""
    while not word or is_held_out_word(word):
        word = "".join(s.rng.choices(pieces, k=s.rng.choice([1, 2, 2, 3])))[:10]
    word = word.capitalize() if s.chance(0.2) else word
    return f"spell {word}", "-".join(word)


def _sort(s: Source) -> Exercise:
    numbers, down = some_numbers(s), s.chance(0.5)
    asked, ordered = ", ".join(map(str, numbers)), sorted(numbers, reverse=down)
    return f"{'down' if down else 'sort'} {asked}", ", ".join(map(str, ordered))


def _reverse(s: Source) -> Exercise:
    words = s.words(2, 5)
    return f"reverse {', '.join(words)}", ", ".join(words[::-1])


def _fill(s: Source) -> Exercise:
    text, answer = series(s, "_")
    return (f"fill {text}", answer) if s.chance(0.6) else (f"fill {text.lower()}", answer.lower())


def _pick(s: Source) -> Exercise:
    """Pick some of a list of facts."""
    values, text = invented_facts(s)
    keys = s.rng.sample(list(values), s.rng.randint(1, len(values)))
    return f"{text} json {', '.join(keys)}", compact({key: values[key] for key in keys})


def _edit(s: Source) -> Exercise:
    """Change one of a list of facts, or the list."""
    values, new = Values(), s.plain_word()
    while len(values) < 2 or new in values:
        values, _ = invented_facts(s)
    key = s.rng.choice(list(values))
    ask = s.rng.choice(["only {k}", "without {k}", "reverse", "rename {k} {n}", "set {k} {n}"])
    after = edited(values, ask.split()[0], key, new)
    return f"{compact(values)} {ask.format(k=key, n=new)}", compact(after)


def _edit_list(s: Source) -> Exercise:
    words = [str(n) for n in some_numbers(s)] if s.chance(0.3) else s.words(2, 5)
    word, new = s.rng.choice(words), s.plain_word()
    ask = s.rng.choice(["without {w}", "add {n}", "reverse", "first", "last"])
    edit = ask.split()[0]
    after = edited_list(words, edit, new if edit == "add" else word)
    return f"{', '.join(words)} {ask.format(w=word, n=new)}", ", ".join(after)


MAKERS: tuple[Callable[[Source], Exercise], ...] = (
    _sort, _sort, _reverse, _fill, _pick, _pick, _edit, _edit, _edit_list, _edit_list,
)  # fmt: skip
