"""Anchors in regular expressions, which match a text as a whole: at its ends they add nothing."""

import re
from collections.abc import Iterable
from typing import Final

_TOKENS: Final = re.compile(
    r"\\[pP]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]"
    r"|\(\?[\w-]+\)|\((?:\?(?:P?<[^>=!]*>|[\w-]*:))?"
    r"|[*+?]\??|\{\d+(?:,\d*)?\}\??|.",
    re.DOTALL,
)
_BEGIN: Final = frozenset({"^", r"\A"})
_END: Final = frozenset({"$", r"\Z", r"\z"})
_WORD: Final = r"\b"
# Outlines-core takes word boundaries in ASCII alone. An anchor may be repeated, so a group stays.
_WRITTEN: Final = {_WORD: r"(?-u:\b)"} | dict.fromkeys(_BEGIN | _END, "(?:)")


def without_anchors(regex: str) -> str:
    """Return an expression that matches the same whole texts, with word boundaries of ASCII.

    Raises ValueError for an anchor within the text.
    """
    tokens: list[str] = _TOKENS.findall(regex)
    if _WRITTEN.keys().isdisjoint(tokens):
        return regex
    last, repeated = len(tokens) - 1, _repeated(tokens)
    ends = _at_edge(tokens, repeated, "(", _BEGIN)
    mirrored = {last - at for at in repeated}
    ends |= {last - at for at in _at_edge(tokens[::-1], mirrored, ")", _END)}
    for at, token in enumerate(tokens):
        if token in _BEGIN | _END and at not in ends:
            raise ValueError(f"{token} is honoured only at an end of the whole text; leave it out")
    return "".join(_WRITTEN.get(token, token) for token in tokens)


def _at_edge(
    tokens: Iterable[str], repeated: set[int], opening: str, anchors: frozenset[str]
) -> set[int]:
    """Return where these anchors stand with no part of the text before them."""
    found, edge, groups = set[int](), True, list[bool]()
    for at, token in enumerate(tokens):
        if token in anchors and edge:
            found.add(at)
        elif token == "|":
            edge = groups[-1] if groups else True
        elif _is_bracket(token) and token[0] == opening:
            edge = edge and at not in repeated
            groups.append(edge)
        elif _is_bracket(token):
            groups[-1:], edge = [], False
        elif not (_is_quantifier(token) or token == _WORD or token.startswith("(?")):
            edge = False
    return found


def _repeated(tokens: list[str]) -> set[int]:
    """Return where the brackets of groups stand that may occur more than once."""
    found, groups = set[int](), list[int]()
    for at, token in enumerate(tokens):
        if _is_bracket(token) and token != ")":
            groups.append(at)
        elif token == ")" and groups:
            start, after = groups.pop(), tokens[at + 1] if at + 1 < len(tokens) else ""
            if _is_quantifier(after) and after[0] != "?":
                found |= {start, at}
    return found


def _is_bracket(token: str) -> bool:
    is_flags = len(token) > 1 and token[-1] == ")"  # (?i) opens no group
    return token[0] in "()" and not is_flags


def _is_quantifier(token: str) -> bool:
    return token[:1] in ("*", "+", "?") or (token[:1] == "{" and len(token) > 1)
