"""Scores of answers: from 0 to 1, given the text and the row of the data that asked for it."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from jsonschema import Draft202012Validator

from diffray.cluster.cli.evaluation.sandbox import failure

Row = Mapping[str, Any]
_NUMBER: Final = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?|[-+]?\.\d+")
_FENCED: Final = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Where a completion has left the function it was asked for.
_BEYOND: Final = re.compile(r"\n(?:class |def |#|if __name__|print\(|@|```)")
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
    """The first capital letter that stands alone is the answer."""
    found = re.search(r"\b[A-Z]\b", text)
    return float(found is not None and found[0] == row["answer"])


def number(text: str, row: Row) -> float:
    """The last number in the text equals that of the answer: `$1,000.` is 1000."""
    return float(last_number(text) == last_number(str(row["answer"])) is not None)


def last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
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
    except ValueError:
        return None


def code(text: str, row: Row) -> float:
    """The function passes its tests, as in HumanEval: `check` of `test`, with `entry_point`."""
    return float(failure(program(text, row)) is None)


def program(text: str, row: Row) -> str:
    """Return what runs the tests: the code block of an answer, or the prompt continued by it."""
    fenced = _FENCED.search(text)
    body = fenced[1] if fenced else text
    name, prompt = row["entry_point"], row["prompt"]
    if re.search(rf"^def {re.escape(name)}\b", body, re.MULTILINE):
        before = prompt[: prompt.rindex(f"def {name}")]  # imports, and functions to call
        body = f"{before}\n{body}"
    else:
        body = prompt + _BEYOND.split(body, maxsplit=1)[0]
    return f"{_IMPORTS}{body}\n{row['test']}\ncheck({name})\n"


SCORERS: Final[dict[str, Callable[[str, Row], float]]] = {
    "exact": exact,
    "contains": contains,
    "regex": regex,
    "choice": choice,
    "number": number,
    "json": json_equal,
    "schema": schema,
    "code": code,
}
NEEDS: Final = {"schema": ("schema",), "code": ("prompt", "entry_point", "test")}  # else: answer
