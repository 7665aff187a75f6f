"""Finds function calls in an answer as its text arrives."""

import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from diffray.components.grammar.tool_calls import CLOSE, HEAD, OPEN

_HEAD: Final = re.compile(re.escape(HEAD).replace("%s", '([^"]*)'))


class Part(NamedTuple):
    """A piece of text, the name of the function called next, or a piece of its arguments."""

    kind: Literal["content", "name", "arguments"]
    text: str


class CallParser:
    """Parses a text in pieces; what may be the start of a mark is held back."""

    def __init__(self) -> None:
        self._rest = ""
        self._within = False  # a call's arguments
        self._closed = False  # a call has just ended

    def feed(self, text: str) -> Iterator[Part]:
        """Yield the parts that are certain after this piece."""
        self._rest += text
        while self._rest:
            if self._closed:
                self._rest, self._closed = self._rest.removeprefix("\n"), False
            mark = CLOSE if self._within else OPEN
            before, found, after = self._rest.partition(mark)
            if not found:
                before = self._rest[: len(self._rest) - _held(self._rest, mark)]
                self._rest = self._rest[len(before) :]
                yield from self._part(before)
                return
            if self._within:
                yield from self._part(before)
                self._within, self._closed, self._rest = False, True, after
                continue
            if (head := _HEAD.match(after)) is None:
                yield from self._part(before)
                self._rest = OPEN + after
                return
            yield from self._part(before)
            yield Part("name", head[1])
            self._within, self._rest = True, after[head.end() :]

    def end(self) -> Iterator[Part]:
        """Yield what was held back; no more text follows."""
        yield from self._part(self._rest)
        self._rest = ""

    def _part(self, text: str) -> Iterator[Part]:
        if text:
            yield Part("arguments" if self._within else "content", text)


def _held(text: str, mark: str) -> int:
    """Return how many of the last characters may be the start of a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)
