"""The body of POST /v1/messages, Anthropic's API, and its translation to a chat's body."""

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from diffray.cluster.api.bodies import MOST_MESSAGES, ModelBody, ReasoningEffort, SharedFields
from diffray.cluster.api.errors import Json
from diffray.cluster.api.fields import EFFORT, NOTED, ImagePart, StrictModel, ToolName, Url, Word
from diffray.components.params import SamplingParams


class _Block(StrictModel):
    """A part of a message; unknown fields are ignored, as clients send answers back whole."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(_Block):
    """A text, or a part of one."""

    type: Literal["text"]
    text: str = Field(description="The text of this part.")

    def for_chat(self) -> Json:
        return {"type": "text", "text": self.text}


class Base64Source(_Block):
    """An image in the request itself."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] = Field(
        description="The format; the one found in the content counts."
    )
    data: str = Field(repr=False, description="The file's content in base64.")

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(_Block):
    """An image at a URL."""

    type: Literal["url"]
    url: Url


class ImageBlock(_Block):
    """An image, for models that accept images."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Discriminator("type")] = Field(
        description="Where the image is."
    )

    def for_chat(self) -> Json:
        return ImagePart.of(self.source.url)


def _is_list(given: Any) -> str:
    return "blocks" if isinstance(given, list) else "text"


Texts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextBlock], Tag("blocks")],
    Discriminator(_is_list),
]
Shown = Annotated[TextBlock | ImageBlock, Discriminator("type")]


class ToolUse(_Block):
    """A function call."""

    type: Literal["tool_use"]
    id: str = Field(description="The call's id, which its result repeats.")
    name: str = Field(description="The function's name.")
    input: dict[str, Any] = Field(description="Its arguments.")


class ToolResult(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(description="The call's id.")
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Shown], Tag("blocks")],
        Discriminator(_is_list),
    ] = Field("", description="What the function returned: a text, or texts and images.")
    is_error: bool = Field(False, description='"Error: " comes before the content.')

    def for_chat(self) -> Json:
        content = _parts(self.content)
        if self.is_error:
            content = [*_parts("Error:"), *content]
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


Block = Annotated[TextBlock | ImageBlock | ToolUse | ToolResult, Discriminator("type")]


_OWNERS: Final = {"tool_use": "assistant", "tool_result": "user", "image": "user"}


class Turn(StrictModel):
    """A message; consecutive ones of the same role are merged."""

    role: Literal["user", "assistant", "system"] = Field(description="Who says it.")
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Block], Tag("blocks")],
        Discriminator(_is_list),
    ] = Field(
        description="A text or a list: texts, the assistant's calls, the user's images and results."
    )

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> Self:
        for block in self.blocks:
            owner = _OWNERS.get(block.type, self.role)
            if owner != self.role:
                raise ValueError(f"{block.type} belongs in a message of the {owner}")
        return self

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)


class AnthropicTool(StrictModel):
    """A function that the model may call."""

    type: Literal["custom"] | None = Field(None, description="Always custom.")
    name: ToolName
    description: str = Field("", description="What it does, for the model.")
    input_schema: dict[str, Any] = Field(description="A JSON schema.")
    strict: bool | None = Field(None, description="Inputs always follow their schema.")
    eager_input_streaming: bool | None = Field(None, description="Inputs are always streamed.")
    cache_control: dict[str, Any] | None = Field(None, description=NOTED)


class AnthropicToolChoice(StrictModel):
    """Whether an answer may, must or must not call a function, or which one."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="auto: it may; any: it must; tool: it must call this one; none: it must not."
    )
    name: str | None = Field(None, description="For the type tool: the function to call.")
    disable_parallel_tool_use: bool = Field(False, description="At most one call.")

    @model_validator(mode="after")
    def _a_name_for_its_type(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('the type "tool" needs a name, and only this type takes one')
        return self


class JsonFormat(StrictModel):
    """An answer in JSON."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema", description="The JSON schema.")


class OutputConfig(StrictModel):
    """The format of an answer's text, and the effort for it."""

    format: JsonFormat | None = Field(None, description="JSON that a schema allows.")
    effort: ReasoningEffort | None = Field(None, description=EFFORT)


class ConversationFields(ModelBody):
    """The fields that make up the prompt."""

    messages: Annotated[
        list[Turn], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    ] = Field(description="If the last one is a text of the assistant, the answer continues it.")
    system: Texts | None = Field(None, description="A system message before the others.")
    tools: Annotated[list[AnthropicTool], Field(max_length=128, fail_fast=True)] = Field(
        default_factory=list,
        description="Functions that the template shows to the model, unless tool_choice is none.",
    )
    tool_choice: AnthropicToolChoice | None = Field(
        None, description="Whether an answer may, must or must not call a function, or which one."
    )
    output_config: OutputConfig = Field(
        default=OutputConfig(), description="The format of the answer's text."
    )
    cache_control: dict[str, Any] | None = Field(None, description=NOTED)

    def prompt_for_chat(self) -> Json:
        """Return the fields of a chat that make up its prompt."""
        messages: list[Json] = []
        if self.system is not None:
            messages.append({"role": "system", "content": _parts(self.system)})
        for turn in self.messages:
            for block in turn.blocks:
                _add(messages, turn.role, block)
        hidden = self.tool_choice is not None and self.tool_choice.type == "none"
        tools = [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
            }
            for tool in ([] if hidden else self.tools)
        ]
        last = messages[-1] if messages else {}
        continues = last.get("role") == "assistant" and "tool_calls" not in last
        return {
            "messages": messages,
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
            "reasoning_effort": self.output_config.effort,
        }


class CountTokensBody(ConversationFields):
    """Count the tokens of a conversation, as Anthropic's Messages do."""

    def for_tokenize(self) -> Json:
        """Return the body of POST /tokenize."""
        return {"model": self.model} | self.prompt_for_chat()


class MessagesBody(SharedFields, ConversationFields):
    """Answer a conversation in the format of Anthropic's Messages.

    Streams are as in `/v1/responses`.
    """

    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: Annotated[list[Word], Field(max_length=32, fail_fast=True)] = Field(
        default_factory=list, description=SamplingParams.model_fields["stop"].description
    )

    def for_chat(self) -> Json:
        """Return the fields of the chat, except the shared ones."""
        chat = self.prompt_for_chat() | {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        if (choice := self.tool_choice) is not None:
            chat["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
            if choice.type == "tool":
                chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
            chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if (form := self.output_config.format) is not None:
            schema = {"schema": form.json_schema}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.stream:  # the first event contains the prompt's length
            chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return chat


def _add(messages: list[Json], role: str, block: Block) -> None:
    """Add a block to the last message if that has this role, else to a new message."""
    if isinstance(block, ToolResult):
        messages.append(block.for_chat())
        return
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    if isinstance(block, ToolUse):
        function = {"name": block.name, "arguments": block.input}
        call = {"id": block.id, "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages[-1]["content"].append(block.for_chat())


def _parts(given: str | Iterable[TextBlock | ImageBlock]) -> list[Json]:
    """Return a text, or texts and images, in a chat's format."""
    shown = [TextBlock(type="text", text=given)] if isinstance(given, str) else given
    return [block.for_chat() for block in shown]
