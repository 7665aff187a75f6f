"""Suggestions for names that do not exist; without pydantic."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return a suggestion if an unknown name resembles an allowed one.

    It follows the name: `'temprature', did you mean 'temperature'?`.
    """
    near = get_close_matches(name, list(allowed), 1) if len(name) < 64 else []
    return f", did you mean {near[0]!r}?" if near else ""
