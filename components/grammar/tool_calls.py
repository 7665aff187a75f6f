"""Function calls in an answer, in the Hermes format, which most chat templates use."""

import re
from collections.abc import Mapping
from typing import Any, Final

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
