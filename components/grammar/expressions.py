"""From a regular expression to an automaton over bytes.

Letters: B bytes, Q states.
"""

import re
from typing import Final

import numpy as np

from diffray.components.config import InvalidField
from diffray.components.grammar.anchors import without_anchors

MOST_STATES: Final = 2**14

_FIRST: Final = "\n"
_LAST: Final = "\U0010ffff"  # not a character


def over_bytes(regex: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the state after each byte in each state, or -1, and where the expression accepts.

    outlines-core drops later alternatives once an earlier one is complete, so that `a|ab` would
    never match ab. A final character that no text has keeps all of them open. It also refuses an
    expression that begins with a word boundary, so a line feed comes before each.
    """
    import outlines_core

    words = outlines_core.Vocabulary(256, {bytes([value]): [value] for value in range(256)})
    try:
        plain = without_anchors(regex)
    except ValueError as error:
        raise InvalidField(f"structured outputs: regex: {error}") from None
    try:
        if _unbalanced(regex):
            raise ValueError("unbalanced parenthesis")
        index = outlines_core.Index(f"{_FIRST}(?:{plain}){_LAST}", words)
    except ValueError:
        raise InvalidField(f"structured outputs: {_why_not(regex)}") from None
    transitions = index.get_transitions()
    start = transitions.pop(index.get_initial_state())[ord(_FIRST)]
    if len(transitions) > MOST_STATES:
        raise too_large()
    names = dict.fromkeys([start, *transitions, *index.get_final_states()])
    number = {name: at for at, name in enumerate(names)}
    next_BQ = np.full((256, len(number)), -1, dtype=np.int32)
    for name, targets in transitions.items():
        at = number[name]
        for value, target in targets.items():
            if value < 256:
                next_BQ[value, at] = number[target]
    matched_Q = np.zeros(len(number) + 1, dtype=bool)  # the last one is for -1
    matched_Q[[number[name] for name in index.get_final_states()]] = True
    after_Q = np.arange(len(number))
    for value in _LAST.encode():
        after_Q = np.where(after_Q < 0, -1, next_BQ[value, after_Q])
    return next_BQ, matched_Q[after_Q]


def _unbalanced(regex: str) -> bool:
    """Whether an expression closes a group that it has not opened."""
    try:
        re.compile(regex)
    except (re.error, RecursionError) as error:
        return "unbalanced parenthesis" in str(error)
    return False


def too_large() -> InvalidField:
    return InvalidField(
        "structured outputs: the texts need too large an automaton; lower maxLength, maxItems or "
        "other counts"
    )


def _why_not(regex: str) -> str:
    """Return what is wrong with an expression, if possible in the words of Python's parser."""
    try:
        re.compile(regex)
    except (re.error, RecursionError) as own:
        return f"regex: {own}"
    return (
        "regex: it cannot be compiled; leave out lookaround, back references, \\B and parts that "
        "no text matches"
    )
