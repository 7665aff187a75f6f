"""The parts of requests' bodies: messages, formats and tools, and numbers in several notations."""

import json
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from diffray.cluster.api.errors import invalid, of_validation
from diffray.cluster.api.noop_fields import refuse_unless_neutral
from diffray.cluster.frontend.prompts import content_of
from diffray.components.grammar.json_schema import SchemaObject
from diffray.components.grammar.structured import StructuredOutputs

_MOST_PROMPTS: Final = 1024
_NO_PROMPT: Final = "expected a text, a list of token ids, or a list of several of these"


def _as_prompts(given: Any) -> list[str | list[int]]:
    """Return a list of prompts; a text or a flat list of ids is one prompt."""
    several = [given] if isinstance(given, str) or (given and _are_ids(given)) else given
    if not several or not isinstance(several, list):
        raise ValueError(_NO_PROMPT)
    if len(several) > _MOST_PROMPTS:
        raise ValueError(f"at most {_MOST_PROMPTS} prompts go into one request")
    if not all(isinstance(each, str) or _are_ids(each) for each in several):
        raise ValueError(_NO_PROMPT)
    return several


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and all(type(token) is int for token in given)


def _as_biases(given: Any) -> dict[int, float]:
    if not isinstance(given, dict) or len(given) > 1024:
        raise ValueError("expected an object of at most 1024 token ids and their biases")
    biases = {}
    for token, bias in given.items():
        if not (str(token).isascii() and str(token).isdigit() and len(str(token)) < 19):
            raise ValueError(f"{str(token)[:40]!r} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"token {token}: a bias is a number from -100 to 100")
        biases[int(token)] = float(bias)
    return biases


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


Ids = list[int]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_as_prompts, json_schema_input_type=str | list[str] | Ids | list[Ids]),
]
Biases = Annotated[
    dict[int, float], PlainValidator(_as_biases, json_schema_input_type=dict[str, float])
]
# `fail_fast` reports only a list's first error; millions of errors would take gigabytes.
Word = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[
    list[Word],
    Field(max_length=32, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=Word | list[Word]),
]
TokenIds = Annotated[list[int], Field(max_length=1024, fail_fast=True)]


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


class JsonSchema(StrictModel):
    """A schema as OpenAI's clients send it; answers always follow it, strict or not."""

    name: str = Field("", description=NOTED)
    description: str = Field("", description=NOTED)
    json_schema: SchemaObject = Field(alias="schema", description="The schema itself.")
    strict: bool = Field(False, description=NOTED)


class ResponseFormat(StrictModel):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text: anything; json_object: any object; json_schema: what a schema allows."
    )
    json_schema: JsonSchema | None = Field(None, description="For json_schema: the schema.")
    bare_schema: SchemaObject | None = Field(
        None, alias="schema", description="For json_object, as llama.cpp's clients send it."
    )

    @model_validator(mode="after")
    def _a_schema_for_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                'the type "json_schema" needs a json_schema, and only this type takes one'
            )
        if self.bare_schema is not None and self.type != "json_object":
            raise ValueError('only the type "json_object" takes a schema')
        return self

    @property
    def structured(self) -> StructuredOutputs | None:
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.json_schema)
        if self.bare_schema is not None:
            return StructuredOutputs(json=self.bare_schema)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


ToolName = Annotated[
    str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", description="The name to call it by.")
]


class ToolFunction(StrictModel):
    """A function that an answer may call."""

    model_config = ConfigDict(extra="ignore")

    name: ToolName
    description: str = Field("", description="What it does, for the model.")
    parameters: SchemaObject = Field(default_factory=dict, description="A JSON schema.")
    strict: bool | None = Field(None, description="Arguments always follow their schema.")


class Tool(StrictModel):
    """A tool that an answer may use; only functions are supported."""

    type: Literal["function"]
    function: ToolFunction = Field(description="The function.")


class FunctionName(StrictModel):
    """A function among the tools."""

    name: str = Field(description="The function's name.")


class NamedTool(StrictModel):
    """The function that an answer must call."""

    type: Literal["function"] = "function"
    function: FunctionName = Field(description="The function to call.")


ToolChoice = Literal["none", "auto", "required"] | NamedTool


AnyBody = TypeVar("AnyBody", bound=StrictModel)


def parse(kind: type[AnyBody], given: object) -> AnyBody:
    """Return a valid body; raises ApiError. Null means the default."""
    if not isinstance(given, dict):
        raise invalid("the body must be a JSON object")
    body = {name: value for name, value in given.items() if value is not None}
    for name in [name for name in body if name not in kind.model_fields]:
        refuse_unless_neutral(str(name), body.pop(name), body, kind.model_fields)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise of_validation(error) from None
