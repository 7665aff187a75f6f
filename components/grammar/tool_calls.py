"""Function calls in an answer, in the Hermes format, which most chat templates use.

`ToolCalls` is the grammar of answers with calls, and `CallParser` finds the calls in a text.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from pydantic import Field

from diffray.components.config import Config
from diffray.components.grammar.json_schema import SchemaObject, regex_of_schema

OPEN: Final = "<tool_call>"
# A call: its function's name, and its arguments as JSON.
HEAD: Final = '\n{"name": "%s", "arguments": '
CLOSE: Final = "}\n</tool_call>"

NO_ARGUMENTS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class ToolCalls(Config):
    """The functions that an answer may call."""

    functions: dict[str, SchemaObject] = Field(
        min_length=1, description="The JSON schema of each function's arguments, by its name."
    )
    text: bool = Field(False, description="An answer may be text, with or without calls after it.")
    several: bool = Field(True, description="An answer may have more than one call.")

    @property
    def pattern(self) -> str:
        """The answers as one regular expression."""
        calls = "|".join(
            re.escape(HEAD % name) + regex_of_schema(schema or NO_ARGUMENTS)
            for name, schema in self.functions.items()
        )
        call = f"{OPEN}(?:{calls}){re.escape(CLOSE)}"
        if self.several:
            call = f"{call}(?:\n{call})*"
        return f"{_without(OPEN)}(?:{call})?" if self.text else call


def _without(word: str) -> str:
    """Return an expression of the texts without a word that has its first letter only once."""
    first, *rest = list(word)
    back = f"[^{first}{rest[-1]}]"  # what leads back to the word's start, after its first letter
    begun = ""
    for letter in reversed(rest[:-1]):
        back = f"(?:[^{first}{letter}]|{letter}{back})"
        begun = f"(?:{letter}{begun})?"
    again = f"{first}(?:{begun}{first})*"
    return f"(?:[^{first}]|{again}{back})*(?:{again}{begun})?"


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
