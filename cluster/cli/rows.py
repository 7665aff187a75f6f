"""Lays out text on a terminal: rows broken at words, and the token of each character."""

import shutil
from collections.abc import Sequence

from rich.cells import cell_len

# Control characters would let an answer move the cursor.
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n")}, " ") | {ord("\t"): "    "}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to


def printable(text: str) -> str:
    """Return a text with spaces instead of control characters, except newlines."""
    return text.translate(_CONTROLS)


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return a text as rows of the terminal."""
    shown = printable(text)
    width = shutil.get_terminal_size().columns - 1 - len(indent)
    return [indent + shown[start:stop].rstrip() for start, stop in rows(shown, max(width, 20))]


def rows(text: str, width: int, column: int = 0) -> list[tuple[int, int]]:
    """Return the range of a text that each row shows; the first row is filled up to `column`.

    A row ends before a word that does not fit, and inside a word only if no row could hold it.
    Trailing spaces may exceed the width; callers must not write those.
    """
    made: list[tuple[int, int]] = []
    start, used = 0, column
    gap = 0 if column else None  # the start of the last word, if one stands before it on the row
    is_blank = column == 0
    for at, sign in enumerate(text):
        if sign == "\n":
            made.append((start, at))
            start, used, gap, is_blank = at + 1, 0, None, True
            continue
        size = cell_len(sign)
        if sign != " " and used + size > width:
            stop = at if gap is None else gap
            made.append((start, stop))
            start, used, gap = stop, cell_len(text[stop:at]), None
        used += size
        if sign != " ":
            is_blank = False
        elif not is_blank:
            gap = at + 1
    return [*made, (start, len(text))]


def owners(tokens: Sequence[str | None], text: str) -> list[int]:
    """Return, for each character of a text, the position of the token that it comes from.

    A character of several tokens belongs to the next token that can be found in the text;
    characters of no token get the position after the last.
    """
    found: list[int] = []
    for position, token in enumerate(tokens):
        if not token or _REPLACEMENT in token:
            continue
        at = text.find(token, len(found))
        if at >= 0:
            found += [position] * (at + len(token) - len(found))
    return found + [len(tokens)] * (len(text) - len(found))
