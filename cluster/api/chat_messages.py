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

from diffray.workers.prompts import content_of

NOTED: Final = "Accepted for compatibility; it has no effect."
EFFORT: Final = "A value for the chat template; without effect if the template does not use it."


class StrictModel(BaseModel):
    """A number in quotes is not a number, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class TextPart(StrictModel):
    """A text."""

    type: Literal["text"]
    text: str = Field(description="The text of this part.")


Url = Annotated[
    str,
    Field(
        repr=False,
        description="A data URL, data:image/png;base64,... (PNG, JPEG, WebP, GIF), or a URL of a "
        "host that the server may fetch from.",
    ),
]
Detail = Annotated[Literal["auto", "low", "high"] | None, Field(description=NOTED)]


class ImageUrl(StrictModel):
    """Where an image is."""

    url: Url
    detail: Detail = None


class ImagePart(StrictModel):
    """An image, for models that accept images."""

    type: Literal["image_url"]
    image_url: ImageUrl = Field(description="The image.")

    @staticmethod
    def of(url: str) -> dict[str, Any]:
        """Return a part of a message as JSON."""
        return {"type": "image_url", "image_url": {"url": url}}


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[Annotated[TextPart | ImagePart, Discriminator("type")]], Tag("parts")],
    Discriminator(lambda given: "parts" if isinstance(given, list) else "text"),
]


def as_arguments(given: Any) -> Any:
    """Return a call's arguments as an object, which templates expect."""
    if isinstance(given, dict):
        return given
    try:
        return json.loads(given or "{}")
    except (TypeError, ValueError, RecursionError):
        raise ValueError("the arguments are not JSON") from None


class Function(StrictModel):
    """A called function and its arguments."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(description="The function's name.")
    arguments: Annotated[Any, BeforeValidator(as_arguments, json_schema_input_type=str)] = Field(
        description="Its arguments, as JSON."
    )


class ToolCall(StrictModel):
    """A call in an earlier answer."""

    model_config = ConfigDict(extra="allow")

    id: str | None = Field(None, description="The call's id, which its result repeats.")
    type: Literal["function"] = "function"
    function: Function = Field(description="What was called.")


class Message(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who says it; developer is the same as system."
    )
    content: Content | None = Field(
        None, validate_default=True, description="The text; only an assistant's may be missing."
    )
    name: str | None = Field(None, description="The speaker's name, for the chat template.")
    tool_calls: list[ToolCall] | None = Field(
        None, description="The calls in an assistant's earlier answer."
    )
    tool_call_id: str | None = Field(
        None, description="The id of the call whose result a tool's message contains."
    )

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, given: Any) -> Any:
        """Drop empty fields, which clients send back with answers."""
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
        """Return the message as templates expect it, with the role's older name."""
        content: str | list[dict[str, Any]] = ""
        if isinstance(self.content, str):
            content = self.content
        elif self.content is not None:
            content = content_of([part.model_dump() for part in self.content])
        return self.model_dump(exclude={"content"}, exclude_unset=True) | {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }

    @property
    def images(self) -> list[str]:
        """The URLs of its images, in order."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]
