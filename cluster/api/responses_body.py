"""The body of POST /v1/responses, OpenAI's newer API, and its translation to a chat's body."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from diffray.cluster.api.bodies import MOST_MESSAGES, ReasoningEffort, SharedFields
from diffray.cluster.api.errors import Json, invalid
from diffray.cluster.api.fields import (
    EFFORT,
    NOTED,
    Detail,
    ImagePart,
    Stops,
    StrictModel,
    ToolName,
    Url,
    as_arguments,
)
from diffray.components.params import SamplingParams

_LOGPROBS = "message.output_text.logprobs"


class _Part(StrictModel):
    """A part of a conversation; unknown fields are ignored, as clients send answers back whole."""

    model_config = ConfigDict(extra="ignore")


class InputText(_Part):
    """A part of a text."""

    type: Literal["input_text", "output_text"] = Field(description="A question, or an answer.")
    text: str = Field(description="The text of this part.")

    def for_chat(self) -> Json:
        return {"type": "text", "text": self.text}


class InputImage(_Part):
    """An image, for models that accept images."""

    type: Literal["input_image"]
    image_url: Url
    detail: Detail = None
    file_id: None = Field(None, description="Not supported: there are no files.")

    def for_chat(self) -> Json:
        return ImagePart.of(self.image_url)


Part = Annotated[InputText | InputImage, Discriminator("type")]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")],
    Discriminator(lambda given: "parts" if isinstance(given, list) else "text"),
]


def _content(given: str | list[Part]) -> str | list[Json]:
    """Return a text, or texts and images, in a chat's format."""
    return given if isinstance(given, str) else [part.for_chat() for part in given]


class InputMessage(_Part):
    """One message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="Who says it; developer is the same as system."
    )
    content: Content = Field(description="A text, or a list of texts and images.")


def _json(arguments: str) -> str:
    as_arguments(arguments)
    return arguments


class FunctionCall(_Part):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str = Field(description="The call's id, which its result repeats.")
    name: str = Field(description="The function's name.")
    arguments: Annotated[str, AfterValidator(_json)] = Field(description="Its arguments, as JSON.")


class FunctionCallOutput(_Part):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str = Field(description="The call's id.")
    output: Content = Field(description="What the function returned.")


def _kind(given: Any) -> str:
    kind = given.get("type", "message") if isinstance(given, dict) else "message"
    return str(kind)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]
Input = Annotated[
    list[InputItem],
    Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
    BeforeValidator(
        lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given,
        json_schema_input_type=str | list[InputItem],
    ),
]


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(None, description="Arguments always follow their schema.")

    def for_chat(self) -> Json:
        function = self.model_dump(exclude_none=True, exclude={"type"})
        return {"type": "function", "function": function}


class FunctionChoice(StrictModel):
    """The only function that may be called."""

    type: Literal["function"]
    name: str = Field(description="The function's name.")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[FunctionChoice, Tag("function")],
    Discriminator(lambda given: "mode" if isinstance(given, str) else "function"),
]


class TextFormat(StrictModel):
    """Whether an answer is text or JSON, and which JSON."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or what a schema allows."
    )
    name: str | None = Field(None, description=NOTED)
    json_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="For json_schema: the JSON schema."
    )
    description: str | None = Field(None, description=NOTED)
    strict: bool | None = Field(None, description="Answers always follow their schema.")

    @model_validator(mode="after")
    def _a_schema_for_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('the type "json_schema" needs a schema, and only this type takes one')
        return self


class TextOptions(StrictModel):
    """The format of an answer's text."""

    format: TextFormat | None = Field(None, description="Text or JSON; default: text.")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=NOTED)


class ReasoningOptions(StrictModel):
    """How much a model that reasons should do so."""

    effort: ReasoningEffort | None = Field(None, description=EFFORT)
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description=NOTED)


class CanvasOptions(StrictModel):
    """What a stream contains besides the answer."""

    include_canvas: bool = Field(False, description="Add events with the current canvas.")
    include_obfuscation: bool = Field(False, description=NOTED)


class ResponsesBody(SharedFields):
    """Answer a conversation in the format of OpenAI's Responses; nothing is stored.

    With `stream: true` the answer comes as server-sent events, each named after the `type` of its
    `data`. After the first event, an error is the last event.
    """

    input: Input = Field(description="A question, or the conversation so far.")
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(
        None, ge=1, description=SamplingParams.model_fields["max_tokens"].description
    )
    max_tool_calls: int | None = Field(None, description="Limits built-in tools; there are none.")
    stop: Stops = Field(default_factory=list)
    reasoning: ReasoningOptions = Field(
        default=ReasoningOptions(), description="The effort of a model that reasons."
    )
    text: TextOptions = Field(default=TextOptions(), description="The format of the answer's text.")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list,
        max_length=8,
        description="Log-probabilities of the tokens; there is no reasoning to include.",
    )
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)] = Field(
        default_factory=list,
        description="Functions that the template shows to the model, unless tool_choice is none.",
    )
    tool_choice: ToolChoice | None = Field(
        None, description="Whether an answer may, must or must not call a function, or which one."
    )
    parallel_tool_calls: bool = Field(True, description="Whether there may be several calls.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description=NOTED)
    stream_options: CanvasOptions | None = Field(None, description="Needs stream: true.")

    @property
    def logprobs(self) -> bool:
        return _LOGPROBS in self.include

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream: true", "stream_options")
        if self.top_logprobs and not self.logprobs:
            raise invalid(f'top_logprobs needs include: ["{_LOGPROBS}"]', "top_logprobs")
        if self.logprobs and self.tools and self.tool_choice != "none":
            raise invalid(
                f"{_LOGPROBS} does not go with tools, whose calls have no log-probabilities; "
                "leave it out of include, or send tool_choice: none",
                "include",
            )
        return self

    def for_chat(self) -> Json:
        """Return the fields of the chat, except the shared ones."""
        chat: Json = {
            "messages": self._messages(),
            "stop": self.stop,
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [tool.for_chat() for tool in self.tools],
            "tool_choice": self.tool_choice,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            "reasoning_effort": self.reasoning.effort,
        }
        if isinstance(self.tool_choice, FunctionChoice):
            named = {"type": "function", "function": {"name": self.tool_choice.name}}
            chat["tool_choice"] = named
        if (form := self.text.format) is not None:
            chat["response_format"] = {"type": form.type}
            if form.json_schema is not None:
                chat["response_format"]["json_schema"] = {"schema": form.json_schema}
        if self.stream:
            watch = self.stream_options is not None and self.stream_options.include_canvas
            chat["stream_options"] = {"include_usage": True, "include_canvas": watch}
        return chat

    def _messages(self) -> list[Json]:
        made: list[Json] = []
        if self.instructions is not None:
            made.append({"role": "system", "content": self.instructions})
        for item in self.input:
            match item:
                case InputMessage():
                    made.append({"role": item.role, "content": _content(item.content)})
                case FunctionCall():
                    if not made or made[-1]["role"] != "assistant":
                        made.append({"role": "assistant", "content": None})
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    made[-1].setdefault("tool_calls", []).append(call)
                case FunctionCallOutput():
                    content = _content(item.output)
                    made.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        return made
