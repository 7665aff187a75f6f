"""Schemas, expressions and choices as automata: what they accept is valid, the rest is refused."""

import json
import random
import re
from decimal import Decimal
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from diffray.components.config import InvalidField
from diffray.components.grammar.automaton import Automaton
from diffray.components.grammar.compile import compile_regex
from diffray.components.grammar.json_numbers import numbers
from diffray.components.grammar.json_schema import _ANNOTATIONS, _HONOURED
from diffray.components.grammar.json_strings import FORMATS
from diffray.components.grammar.structured import StructuredOutputs
from tests.helpers.random_grammars import random_ids
from tests.helpers.random_schemas import KINDS, checked, random_schema

# A token for each letter, one for a character of two bytes, and one of several letters.
TEXTS = [bytes([code]) for code in range(32, 127)] + ["\u00e9".encode(), b'": "']
END = len(TEXTS)
ENDS = "ab", "c", "cc", "ccc"
USAGE = Path(__file__).parents[2] / "docs/usage.md"


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(levels - 1):
        found = {"type": "array", "items": found}
    return found


OBJECT = {"type": "object"}
DEEP, SHALLOW = nested(2000), nested(101)


def automaton_of(**given: Any) -> Automaton:
    vocabulary = {text: [token] for token, text in enumerate(TEXTS)}
    return compile_regex(StructuredOutputs(**given).pattern, vocabulary, (END,), END + 1)


def random_text(automaton: Automaton, draw: random.Random, budget: int) -> str:
    return b"".join(TEXTS[token] for token in random_ids(automaton, draw, budget)).decode()


def test_what_a_schema_s_automaton_accepts_is_valid() -> None:
    draw = random.Random(1)
    for number in range(300):
        kind = KINDS[number % len(KINDS)]
        schema = random_schema(draw, kind=kind) | {"$defs": {"T": random_schema(draw, 0)}}
        automaton = automaton_of(json=schema)
        for spare in (0, 5, 40, 400):
            text = random_text(automaton, draw, automaton.shortest + spare)
            checked(schema, json.loads(text))


def test_a_recursive_schema_ends() -> None:
    node = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}},
        "required": ["v"],
    }
    automaton = automaton_of(json=node)
    draw = random.Random(2)
    for spare in (0, 10, 60):
        text = random_text(automaton, draw, automaton.shortest + spare)
        jsonschema.validate(json.loads(text), node)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": {"type": "integer", "multipleOf": 3}}, "'multipleOf'"),
        ({"json": {"properties": {"a": {"not": {}}}} | OBJECT}, "json.properties.a: .*'not'"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "may overlap"),
        ({"json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]} | OBJECT}, "itself"),
        ({"json": {"$ref": "https://example.com"}}, "not within the schema"),
        ({"json": {"type": "string", "format": "iri"}}, "format 'iri'"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "assert"),
        ({"json": "{"}, "not JSON"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "no integer"),
        ({"json": {"type": "number", "minimum": 1e-31}}, "the bound 1E-31 has over 30 decimals"),
        ({"json": {"type": "number", "minimum": float("nan")}}, "the bound nan is not a number"),
        ({"json": DEEP}, "json: .*at most 100 nested"),
        ({"json": json.dumps(SHALLOW)}, "json: .*at most 100 nested"),
        ({"json": '{"items":' * 2000 + "1" + "}" * 2000}, "not JSON|at most 100 nested"),
        ({"tool_calls": {"functions": {"f": DEEP}}}, "tool_calls.functions.f: .*at most 100"),
        ({"regex": "(" * 2000 + "a" + ")" * 2000}, "regex: .*nest|regex: .*recursion"),
        ({"json": {"type": "string", "pattern": "a^b"}}, r"\^ is honoured only at an end"),
        ({"regex": "a)(b"}, "unbalanced parenthesis"),
        ({"regex": "^a$b"}, r"regex: \$ is honoured only at an end of the whole text; leave it"),
        ({"regex": "(?:^a)+"}, r"regex: \^ is honoured only"),
        ({"regex": "(?:a|^b)*"}, r"regex: \^ is honoured only"),
        ({"regex": r"a\bb"}, r"regex: it cannot be compiled; leave out look.*no text matches$"),
        ({"regex": r"(a)\1"}, "regex: it cannot be compiled; leave out lookaround, back refer"),
    ],
)
def test_what_cannot_be_honoured_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        automaton_of(**given)


def documented(row: str) -> set[str]:
    (line,) = (line for line in USAGE.read_text().splitlines() if line.startswith(f"| {row} |"))
    return set(re.findall("`([^`]+)`", line))


def test_the_documented_keywords_are_those_of_the_code() -> None:
    honoured = frozenset[str]().union(*_HONOURED.values())
    assert documented("supported") == honoured
    assert documented("ignored") == _ANNOTATIONS
    assert documented("formats") == FORMATS.keys()
    known = jsonschema.Draft202012Validator.VALIDATORS.keys()
    assert documented("refused by name") == known - honoured - _ANNOTATIONS
    for keyword in documented("refused by name"):
        with pytest.raises(InvalidField, match=re.escape(repr(keyword))):
            automaton_of(json={"type": "object", keyword: {}})


def test_the_deepest_schema_is_written() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(49):  # two levels each
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    text = '{"a":' * 49 + '"x"' + "}" * 49
    assert re.fullmatch(StructuredOutputs(json=schema).pattern, text)


@pytest.mark.parametrize("given", [{}, {"regex": "a", "choice": ["b"]}, {"choice": []}])
def test_one_kind_is_given(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=r"one of|at least one"):
        StructuredOutputs(**given)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"choice": ["yes", "no", "a.b*"]}, {"yes", "no", "a.b*"}),
        ({"choice": ["a", "ab", "abc"]}, {"a", "ab", "abc"}),
        ({"regex": "a|ab|abc"}, {"a", "ab", "abc"}),
        ({"regex": r"^(?:a$|b)|(?i)^c\Z"}, {"a", "b", "c", "C"}),
        ({"regex": r"^\b[ab] ?\bc[$^]?$"}, {f"{a} c{s}" for a in "ab" for s in ("", "$", "^")}),
        ({"regex": "(?:a|ab)c?"}, {"a", "ab", "ac", "abc"}),
        ({"regex": "[0-1]{2}-(?:ab|c+)x"}, {f"{n:02b}-{s}x" for n in range(4) for s in ENDS}),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 9}}, set("23456789")),
        ({"json": {"type": "integer", "minimum": 8, "maximum": 12}}, {"8", "9", "10", "11", "12"}),
    ],
)
def test_these_are_all_texts(given: dict[str, Any], texts: set[str]) -> None:
    automaton, draw = automaton_of(**given), random.Random(5)
    assert {random_text(automaton, draw, 8) for _ in range(600)} == texts


def test_numbers_within_bounds_are_those_of_the_expression() -> None:
    """Near the bounds and elsewhere, by exact arithmetic, whether bounds are whole or not."""
    draw, tests = random.Random(3), {"minimum": ge, "maximum": le}
    tests |= {"exclusiveMinimum": gt, "exclusiveMaximum": lt}
    for _ in range(500):
        bounds = {
            key: draw.choice(
                [draw.randint(-12, 12), round(draw.uniform(-3, 3), draw.randint(0, 3))]
            )
            for key in draw.sample([*tests], draw.randint(1, 3))
        }
        exact = {key: Decimal(str(bound)) for key, bound in bounds.items()}
        steps = [at * Decimal(10) ** -places for at in (-1, 0, 1) for places in range(5)]
        texts = [f"{bound + step:f}" for bound in exact.values() for step in steps]
        texts += ["-0", "0.00", *(f"{draw.uniform(-15, 15):.2f}" for _ in range(30))]
        valid = {
            text: all(tests[key](Decimal(text), bound) for key, bound in exact.items())
            for text in texts
        }
        try:
            pattern = re.compile(numbers("x", bounds))
        except InvalidField as error:
            assert "no number is within" in str(error) and not any(valid.values())
        else:
            assert {text: pattern.fullmatch(text) is not None for text in texts} == valid, bounds
