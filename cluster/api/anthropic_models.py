"""Answers at Anthropic's paths, for the OpenAPI document; tests check real answers against them."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, RootModel

from diffray.cluster.api.answer_models import Answered, AnthropicRefusal, Effort, MayNest, Warned
from diffray.cluster.api.anthropic_body import TextBlock, ToolUse


class CountedTokens(Warned):
    input_tokens: int = Field(description="Tokens of the prompt.")


class MessagesUsage(Answered):
    """Tokens of the request and of the answer."""

    input_tokens: int = Field(description="Tokens of the prompt whose K/V were computed.")
    cache_creation_input_tokens: int = Field(description="Always 0.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt with shared K/V.")
    output_tokens: int = Field(description="Tokens of the answer, with its end token.")
    approximate: bool = Field(
        False, description="With first_step_caching approx: it read K/V of another prompt."
    )


class Ending(Answered):
    """Why an answer ended."""

    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = Field(
        description="Why it ended; max_tokens: that limit or the context; null until it ends."
    )
    stop_sequence: str | None = Field(description="The stop sequence that was found.")


Made = Annotated[TextBlock | ToolUse, Discriminator("type")]


class MessagesAnswer(Ending, MayNest, Warned):
    """A whole answer; in a stream, its start."""

    id: str = Field(description="The answer's id, which ends in the request's request_id.")
    type: Literal["message"]
    role: Literal["assistant"]
    model: str = Field(description="The model's name.")
    content: list[Made] = Field(description="Texts and function calls.")
    usage: MessagesUsage = Field(description="Token counts.")
    diffusion: Effort | None = Field(None, description="The work it took; missing at the start.")


class MessageStart(Answered):
    type: Literal["message_start"]
    message: MessagesAnswer = Field(description="The answer, still empty.")


class Ping(Answered):
    type: Literal["ping"]


class BlockStart(Answered):
    type: Literal["content_block_start"]
    index: int = Field(description="The number of the block within content.")
    content_block: Made = Field(description="The block, still empty.")


class MoreText(Answered):
    type: Literal["text_delta"]
    text: str = Field(description="More text.")


class MoreInput(Answered):
    type: Literal["input_json_delta"]
    partial_json: str = Field(description="The next part of a call's input, as JSON.")


class BlockDelta(Answered):
    type: Literal["content_block_delta"]
    index: int = Field(description="The number of the block.")
    delta: Annotated[MoreText | MoreInput, Discriminator("type")] = Field(
        description="What is new."
    )


class BlockStop(Answered):
    type: Literal["content_block_stop"]
    index: int = Field(description="The number of the block.")


class MessageEnd(MayNest, Warned):
    type: Literal["message_delta"]
    delta: Ending = Field(description="Why the answer ended.")
    usage: MessagesUsage = Field(description="Token counts.")
    diffusion: Effort | None = Field(None, description="The work it took.")


class MessageStop(Answered):
    type: Literal["message_stop"]


class MessagesEvent(
    RootModel[
        Annotated[
            MessageStart
            | Ping
            | BlockStart
            | BlockDelta
            | BlockStop
            | MessageEnd
            | MessageStop
            | AnthropicRefusal,
            Discriminator("type"),
        ]
    ]
):
    """The data of one event of a stream, in the order in which they are sent."""
