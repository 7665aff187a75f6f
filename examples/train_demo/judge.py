"""Judges answers to the questions written by hand, whatever their wording.

Numbers are judged by the last one in the answer, JSON by its content, functions by their results.
"""

import ast
import json
import re
from typing import Any

from diffray.components.grammar.tool_calls import OPEN

Checks = list[list[Any]]  # each an expression and its value; f stands for the function


def bare(call: str) -> str:
    """Return a call's JSON, its name and arguments, without the marks."""
    return call.removeprefix(OPEN).removesuffix("</tool_call>")


def is_json(text: str, expected: dict[str, Any]) -> bool:
    """Return whether the text is JSON of the expected pairs in the expected order."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and list(found.items()) == list(expected.items())


def returns(text: str, checks: Checks) -> bool:
    """Return whether the text is one function that returns what the checks say.

    It may only return an expression, without imports or dunders, so that a model's code can do no
    more than calculate.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    body = tree.body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef) or "__" in text:
        return False
    if [type(line) for line in body[0].body] != [ast.Return]:
        return False
    names = (sum, max, min, len, abs, sorted, set, list, reversed)
    scope: dict[str, Any] = {"__builtins__": {n.__name__: n for n in names}}
    try:
        exec(compile(tree, "answer", "exec"), scope)
        scope["f"] = scope[body[0].name]
        return all(eval(expression, scope) == _wanted(value) for expression, value in checks)
    except Exception:  # whatever a wrong function raises, it is wrong
        return False


def _wanted(value: Any) -> Any:
    """Return the value; JSON has no sets, so they are written as text."""
    if isinstance(value, str) and value.startswith("{"):
        return ast.literal_eval(value)
    return value


def is_right(kind: str, answer: str, expected: str | dict[str, Any] | Checks) -> bool:
    """Return whether the answer is right; the type of `expected` says how to compare."""
    if isinstance(expected, dict):  # or a call's name and arguments
        return is_json(bare(answer), expected)
    if isinstance(expected, list):
        return returns(answer, expected)
    if kind in ("arithmetic", "math") or "=" in answer:
        return re.findall(r"\d+", answer)[-1:] == [expected]
    return answer == expected
