"""Context-free grammars: what their automata accept, against all short texts of the grammars."""

import itertools
import random
from typing import Any

import pytest

from diffray.components.config import InvalidField
from diffray.components.grammar import context_free
from diffray.components.grammar.automaton import Automaton
from diffray.components.grammar.bad_words import avoiding_within
from diffray.components.grammar.compile import compile_grammar
from diffray.components.grammar.gbnf import Either, Ref, Repeat, Row, Text, read_grammar
from tests.helpers.random_grammars import state_after

LETTERS = "ab()+*-,\u00e9"
END = len(LETTERS)
LONGEST = 4


def automaton_of(grammar: str) -> Automaton:
    vocabulary = {letter.encode(): [token] for token, letter in enumerate(LETTERS)}
    return compile_grammar(grammar, vocabulary, (END,), END + 1)


def accepted(automaton: Automaton, letters: str, longest: int = LONGEST) -> set[str]:
    found = set()
    for length in range(longest + 1):
        for text in map("".join, itertools.product(letters, repeat=length)):
            ids = [LETTERS.index(letter) for letter in text]
            if state_after(automaton, [*ids, END]) == automaton.end:
                found.add(text)
    return found


def derived(rules: dict[str, list[list[str]]]) -> set[str]:
    """Return all short texts of rules, by adding what their options make until nothing is new."""
    found: dict[str, set[str]] = {name: set() for name in rules}
    while True:
        before = sum(map(len, found.values()))
        for name, options in rules.items():
            for option in options:
                texts = {""}
                for part in option:
                    more = found.get(part, {part})
                    texts = {a + b for a in texts for b in more if len(a + b) <= LONGEST}
                found[name] |= texts
        if sum(map(len, found.values())) == before:
            return found["root"]


def random_rules(draw: random.Random) -> dict[str, list[list[str]]]:
    names = ["root", "x", "y"]
    return {
        name: [
            [draw.choice([*names, "a", "b", "b"]) for _ in range(draw.randint(0, 3))]
            for _ in range(draw.randint(1, 3))
        ]
        for name in names
    }


def written(rules: dict[str, list[list[str]]]) -> str:
    def row(option: list[str]) -> str:
        return " ".join(part if part in rules else f'"{part}"' for part in option)

    return "\n".join(f"{name} ::= {' | '.join(map(row, rules[name]))}" for name in rules)


def test_random_grammars_equal_their_derivations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_free, "DEEPEST", 2 * LONGEST + 1)
    draw, compared, exact = random.Random(1), 0, 0
    while compared < 60:
        rules = random_rules(draw)
        if not (texts := derived(rules)):
            continue
        compared += 1
        automaton = automaton_of(written(rules))
        found = accepted(automaton, "ab")
        assert found <= texts, written(rules)
        if automaton.depth is None or automaton.depth >= 2 * LONGEST:
            exact += 1
            assert found == texts, written(rules)
    assert exact > 30


@pytest.mark.parametrize(
    ("grammar", "same"),
    [
        ('root ::= "a" root | "b"', '"a"* "b"'),
        ('root ::= root "a" | "b"', '"b" "a"*'),
        ('root ::= x\nx ::= "a" y\ny ::= "b" x | ""', '("ab")* "a"'),
        ('root ::= "a" ("," root)?', '"a" (",a")*'),
        ('root ::= root "+" root | root "*" | "a"', '"a" "*"* ("+a" "*"*)*'),
    ],
)
def test_lists_by_recursion_are_as_long_as_they_like(grammar: str, same: str) -> None:
    automaton, plain = automaton_of(grammar), automaton_of(f"root ::= {same}")
    assert plain.depth is None
    assert automaton.depth is None
    assert accepted(automaton, "ab,+*") == accepted(plain, "ab,+*") != set()


def test_nesting_ends_at_a_depth() -> None:
    automaton = automaton_of('root ::= "(" root ")" | "a"')
    assert automaton.depth is not None and automaton.depth > 20
    assert accepted(automaton, "(a)", 5) == {"a", "(a)", "((a))"}
    open_, close = LETTERS.index("("), LETTERS.index(")")
    for deep in (automaton.depth, automaton.depth + 1):
        ids = [open_] * deep + [0] + [close] * deep + [END]
        assert (state_after(automaton, ids) == automaton.end) == (deep == automaton.depth)


def test_ambiguous_and_branching_grammars_stay_small() -> None:
    grammar = 'root ::= root root | "(" root ")" | "a" root "b" | "-" root | ""'
    automaton = automaton_of(grammar)
    assert automaton.depth is not None and len(automaton.set_QD) < 5000
    texts = accepted(automaton, "ab()-", 4)
    assert {"", "()", "(-)", "ab()", "-ab", "a()b"} <= texts and not {"(", "ba", "(a)b"} & texts


def test_a_label_outlives_bytes_and_bad_words() -> None:
    automaton = automaton_of('root ::= "(" root ")" | "a"*')
    kept = automaton.to_bytes()
    assert Automaton.from_bytes(kept).depth == automaton.depth
    assert avoiding_within(kept, ((0, 0),)).depth == automaton.depth
    assert automaton.without(frozenset({1})).depth == automaton.depth


def test_every_sign_is_read() -> None:
    rules = read_grammar(
        r"""
        # a comment
        root ::= "|)" [^"\]\x41-\u00ff-] (x | .)? x{2} |
                 x{1,} x{0,3} "\n\"@"   # at the end of a line
        x::="]" +
        """.replace("@", "\u00e9")
    )
    x = Ref("x")
    options: Any = rules["root"]
    first, second = options.options
    assert first.parts[0] == Text(b"|)")
    assert first.parts[1].regex == r"[^\x22-\x22\x5d-\x5d\x41-" + "\u00ff" + r"\x2d-\x2d]"
    assert isinstance(first.parts[2], Repeat) and first.parts[2][1:] == (0, 1)
    assert first.parts[3] == Repeat(x, 2, 2)
    assert second.parts == (Repeat(x, 1, None), Repeat(x, 0, 3), Text('\n"\u00e9'.encode()))
    assert rules["x"] == Either((Row((Repeat(Text(b"]"), 1, None),)),))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "'root' is not a rule"),
        ("start: x", "':' is not GBNF"),
        ('root ::= "a"\nroot ::= "b"', "line 2: 'root' is defined twice"),
        ('root ::= "a"\n  | y', "line 2: 'y' is not a rule"),
        ('root ::= ("a"', "line 1: 'the end' is unexpected"),
        ('root ::= "a" )', r"'\)' is unexpected"),
        ("root ::= *", r"'\*' is unexpected"),
        ('root ::= "a"{3,2}', "not a valid repetition"),
        ('root ::= "a"{1001}', "the most is 1000"),
        ('root ::= "\\q"', r"has \\q, which is not a character"),
        ('root ::= "\\ud800"', "which is not a character"),
        ("root ::= [b-a]", "no characters from b to a"),
        ("root ::= [^]", "excludes nothing"),
        ('root ::= "a', "is not GBNF"),
        ('root ::= "a" root', "none of its texts ends"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "too many nested parentheses"),
        ('root ::= "' + "a" * 70000 + '"', "characters, and"),
        ('root ::= (("a"{1000}){1000}){1000}', "too large an automaton"),
    ],
)
def test_an_invalid_grammar_is_refused(grammar: str, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        automaton_of(grammar)
