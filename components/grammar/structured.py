"""The ways in which a request constrains its text, as regular expressions or a grammar."""

import json
import re
import warnings
from typing import Any, Final, Self

from pydantic import Field, model_validator

from diffray.components.config import Config, InvalidField
from diffray.components.grammar.json_fields import Part, choice_of, parts_of_schema
from diffray.components.grammar.json_schema import AnySchema, not_too_deep, regex_of_schema
from diffray.components.grammar.tool_calls import ToolCalls

_KINDS: Final = ("json", "json_object", "regex", "choice", "grammar", "tool_calls")


with warnings.catch_warnings():
    # vLLM's name for a schema is that of a deprecated method of pydantic's models.
    warnings.simplefilter("ignore", UserWarning)

    class StructuredOutputs(Config):
        """What an answer must match, given in one of several ways; vLLM's names."""

        json: AnySchema = Field(  # type: ignore[assignment]  # pydantic's own method
            None, description="A JSON schema, as an object or as text."
        )
        json_object: bool = Field(
            False, description="Any JSON object; its values are at most two levels deep."
        )
        regex: str | None = Field(None, description="A regular expression for the whole text.")
        choice: tuple[str, ...] | None = Field(None, description="One of these texts.")
        grammar: str | None = Field(
            None, description="A context-free grammar in GBNF that starts at the rule `root`."
        )
        tool_calls: ToolCalls | None = Field(None, description="Calls of these functions.")

        @model_validator(mode="after")
        def _one_kind(self) -> Self:
            given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
            if len(given) != 1:
                raise InvalidField(
                    f"give one of {', '.join(_KINDS)}"
                    + (f", not {' and '.join(given)}" if given else "")
                )
            if self.choice is not None and (not self.choice or "" in self.choice):
                raise InvalidField("choice needs at least one text, and none empty", "choice")
            return self

        @property
        def pattern(self) -> str:
            """The texts as one regular expression; raises InvalidField for what cannot be one."""
            if self.regex is not None:
                return self.regex
            if self.tool_calls is not None:
                return self.tool_calls.pattern
            if self.choice is not None:
                return "|".join(map(re.escape, self.choice))
            return regex_of_schema({"type": "object"} if self.json_object else self._schema)

        @property
        def parts(self) -> list[Part]:
            """The texts as literals and fields, for a pinned canvas."""
            if self.choice is not None:
                return [choice_of(self.choice)]
            if self.json is None:
                raise InvalidField(
                    "diffusion.canvas 'pinned' needs a JSON schema or a choice to fill in",
                    "diffusion.canvas",
                )
            return parts_of_schema(self._schema)

        @property
        def _schema(self) -> Any:
            if not isinstance(self.json, str):
                return self.json
            try:
                found = json.loads(self.json)
            except (ValueError, RecursionError) as error:
                raise InvalidField(f"json: the schema is not JSON: {error}", "json") from None
            try:
                return not_too_deep(found)
            except ValueError as error:
                raise InvalidField(f"json: {error}", "json") from None
