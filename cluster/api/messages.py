"""The messages of a conversation, as OpenAI's clients send them."""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

NOTED: Final = "Accepted for compatibility; it has no effect."


class StrictModel(BaseModel):
    """A number in quotes is not a number, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("parts")],
    Discriminator(lambda given: "parts" if isinstance(given, list) else "text"),
]


def _as_arguments(given: Any) -> Any:
    """Return a call's arguments as an object, which templates expect."""
    if isinstance(given, dict):
        return given
    try:
        return json.loads(given or "{}")
    except (TypeError, ValueError, RecursionError):
        raise ValueError("the arguments are not JSON") from None


class Function(StrictModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: Annotated[Any, BeforeValidator(_as_arguments, json_schema_input_type=str)]


class ToolCall(StrictModel):
    """A call in an earlier answer."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, validate_default=True)
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, given: Any) -> Any:
        """Clients send answers back with all their empty fields."""
        if not isinstance(given, dict):
            return given
        return {n: v for n, v in given.items() if n == "content" or v not in (None, [], {})}

    @field_validator("content", "tool_calls", "tool_call_id")
    @classmethod
    def _fits_the_role(cls, value: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role")
        match info.field_name:
            case "content" if value is None and role != "assistant":
                raise ValueError("only an assistant's message may be without text")
            case "tool_calls" if role != "assistant":
                raise ValueError("only an assistant's message has calls")
            case "tool_call_id" if role != "tool":
                raise ValueError("only a tool's message answers a call")
        return value

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it: with one text, and the role's older name."""
        content, role = self.content or "", self.role
        return self.model_dump(exclude_unset=True) | {
            "role": "system" if role == "developer" else role,
            "content": content if isinstance(content, str) else "\n".join(p.text for p in content),
        }
