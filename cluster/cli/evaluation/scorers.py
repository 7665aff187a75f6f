"""Scores of answers: from 0 to 1, given the text and the row of the data that asked for it."""

import json
import re
from collections.abc import Callable, Mapping
from textwrap import dedent
from typing import Any, Final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from diffray.cluster.cli.evaluation.sandbox import failure

Row = Mapping[str, Any]
# Thousands may have commas; a hyphen after a letter or a digit is no sign.
_NUMBER: Final = re.compile(
    r"(?:(?<!\w)[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
    r"|(?:(?<!\w)[-+])?(?<!\d)\.\d+"
)
_FENCED: Final = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
# Where a completion has left the function it was asked for.
_BEYOND: Final = re.compile(r"\n(?:class |def |#|if __name__|print\(|@|```)")
_FUTURE: Final = re.compile(r"^from __future__ .*\n", re.MULTILINE)
_IMPORTS: Final = "from typing import *\nimport math, re, collections, itertools, functools\n"


def exact(text: str, row: Row) -> float:
    """The text is the answer, but for blanks around it."""
    return float(text.strip() == str(row["answer"]).strip())


def contains(text: str, row: Row) -> float:
    """The answer is part of the text."""
    return float(str(row["answer"]) in text)


def regex(text: str, row: Row) -> float:
    """The regular expression under `answer` matches the whole text."""
    return float(re.fullmatch(row["answer"], text.strip(), re.DOTALL) is not None)


def choice(text: str, row: Row) -> float:
    """The letter after "answer", or else the first one that stands alone, is the answer."""
    for pattern in (r"[Aa]nswer\W+(?:is\W+)?([A-Z])\b", r"\b([A-Z])\b(?! [a-z])", r"\b([A-Z])\b"):
        if found := re.search(pattern, text):
            return float(found[1] == row["answer"])
    return 0.0


def number(text: str, row: Row) -> float:
    """The last number in the text equals that of the answer: `$1,000.` is 1000."""
    return float(last_number(text) == last_number(str(row["answer"])) is not None)


def last_number(text: str) -> float | None:
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return float(found[-1].replace(",", "")) if found else None


def json_equal(text: str, row: Row) -> float:
    """The share of the answer's fields that the text, as JSON, has with the same values."""
    wanted, found = row["answer"], as_json(text)
    wanted = as_json(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(wanted, dict) or not isinstance(found, dict):
        return float(found is not None and found == wanted)
    right = [name in found and found[name] == value for name, value in wanted.items()]
    return right.count(True) / max(len(wanted.keys() | found.keys()), 1)


def schema(text: str, row: Row) -> float:
    """The text is JSON that the row's schema allows."""
    found = as_json(text)
    return float(found is not None and Draft202012Validator(row["schema"]).is_valid(found))


def as_json(text: str) -> Any:
    """Return the JSON of a text or of the code block in it; None for what is no JSON."""
    fenced = _FENCED.search(text)
    try:
        return json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return None


def code(text: str, row: Row) -> float:
    """The function in an answer passes its tests, as in HumanEval: `check` of `test`."""
    return float(failure(program(text, row)) is None)


def completion(text: str, row: Row) -> float:
    """The function that continues the prompt passes its tests."""
    return float(failure(tested(row["prompt"] + _BEYOND.split(text, maxsplit=1)[0], row)) is None)


def program(text: str, row: Row) -> str:
    """Return what runs the tests of an answer: the code block that has the function, or all."""
    name, prompt = row["entry_point"], row["prompt"]
    defined = re.compile(rf"^def {re.escape(name)}\b", re.MULTILINE)
    blocks = [dedent(block) for block in _FENCED.findall(text)] or [text]
    body = next((block for block in blocks if defined.search(block)), None)
    if body is None:
        return tested(prompt + _BEYOND.split(blocks[0], maxsplit=1)[0], row)
    before = defined.split(prompt, maxsplit=1)[0]  # imports, and functions to call
    return tested(f"{before}\n{body}", row)


def tested(body: str, row: Row) -> str:
    """Return a program with its tests; what must be the first statement comes first."""
    first = _FUTURE.findall(body)
    body = _FUTURE.sub("", body)
    return f"{''.join(first)}{_IMPORTS}{body}\n{row['test']}\ncheck({row['entry_point']})\n"


SCORERS: Final[dict[str, Callable[[str, Row], float]]] = {
    "exact": exact,
    "contains": contains,
    "regex": regex,
    "choice": choice,
    "number": number,
    "json": json_equal,
    "schema": schema,
    "code": code,
    "completion": completion,
}
_OF_CODE: Final = ("prompt", "entry_point", "test")
NEEDS: Final = {"schema": ("schema",), "code": _OF_CODE, "completion": _OF_CODE}  # else: answer


def check_row(scorer: str, row: Row) -> None:
    """Raise ValueError if a scorer cannot score answers to a row."""
    for name in NEEDS.get(scorer, ("answer",)):
        if name not in row:
            raise ValueError(f"the scorer {scorer!r} needs {name!r}")
    try:
        if scorer == "regex":
            re.compile(row["answer"])
        if scorer == "schema":
            Draft202012Validator.check_schema(row["schema"])
    except (re.error, TypeError, SchemaError) as error:
        raise ValueError(str(error).splitlines()[0]) from None
