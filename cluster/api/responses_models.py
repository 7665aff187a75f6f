"""Answers of /v1/responses, for the OpenAPI document; tests check real answers against them."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, RootModel

from diffray.cluster.api.answer_models import Answered, Effort, LikelyToken, MayNest, View, Warned
from diffray.cluster.api.bodies import ReasoningEffort
from diffray.cluster.api.responses_body import FunctionTool, TextFormat, ToolChoice

State = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answered):
    type: Literal["output_text"]
    text: str = Field(description="The text.")
    annotations: list[None] = Field(max_length=0, description="Always empty.")
    logprobs: list[LikelyToken] = Field(description="If include asks for them, one per token.")


class OutputMessage(Answered):
    type: Literal["message"]
    id: str = Field(description="The item's id.")
    status: State = Field(description="Its state; incomplete: cut off by a limit.")
    role: Literal["assistant"]
    content: list[OutputText] = Field(description="One text; none when the item is added.")


class OutputCall(Answered):
    type: Literal["function_call"]
    id: str = Field(description="The item's id.")
    status: State = Field(description="Its state; incomplete: cut off by a limit.")
    call_id: str = Field(description="The call's id, which its result repeats.")
    name: str = Field(description="The function's name.")
    arguments: str = Field(description="Its arguments, as JSON.")


Output = Annotated[OutputMessage | OutputCall, Discriminator("type")]


class CachedTokens(Answered):
    cached_tokens: int = Field(description="Tokens of the prompt whose K/V were shared.")
    approximate: bool = Field(
        False, description="With first_step_caching approx: an answer read K/V of another prompt."
    )
    cache_write_tokens: int = Field(description="Always 0.")


class ReasoningTokens(Answered):
    reasoning_tokens: int = Field(description="Always 0.")


class ResponseUsage(Answered):
    """Tokens of the request and of the answer."""

    input_tokens: int = Field(description="Tokens of the prompt.")
    input_tokens_details: CachedTokens = Field(description="Details about these tokens.")
    output_tokens: int = Field(description="Tokens of the answer, with its end token.")
    output_tokens_details: ReasoningTokens = Field(description="Details about these tokens.")
    total_tokens: int = Field(description="The sum of both.")


class ResponseError(Answered):
    code: Literal["rate_limit_exceeded", "server_error"] = Field(description="The kind of error.")
    message: str = Field(description="What is wrong, and how to fix it.")


class IncompleteDetails(Answered):
    reason: Literal["max_output_tokens"] = Field(description="This limit, or the context's end.")


class NoReasoning(Answered):
    effort: ReasoningEffort | None = Field(description="As in the request.")
    summary: None = Field(description="Always null.")


class ResponseText(Answered):
    format: TextFormat = Field(description="As in the request.")
    verbosity: Literal["low", "medium", "high"] = Field(description="As in the request.")


class Response(MayNest, Warned):
    """A whole answer; in a stream the answer so far."""

    id: str = Field(description="The answer's id, which ends in the request's request_id.")
    object: Literal["response"]
    created_at: int = Field(description="When it began, in seconds since 1970.")
    completed_at: int | None = Field(description="When it ended, if it is completed.")
    status: State | Literal["failed"] = Field(
        description="Its state; incomplete: cut off by max_output_tokens or the context."
    )
    error: ResponseError | None = Field(description="What failed; only in streams.")
    incomplete_details: IncompleteDetails | None = Field(description="Why it is incomplete.")
    output: list[Output] = Field(description="The text, or function calls.")
    usage: ResponseUsage | None = Field(description="Token counts; null until it ends.")
    diffusion: Effort | None = Field(None, description="The work it took; missing until it ends.")
    model: str = Field(description="The model's name.")
    instructions: str | None = Field(description="As in the request.")
    max_output_tokens: int | None = Field(description="As in the request.")
    max_tool_calls: int | None = Field(description="As in the request.")
    metadata: dict[str, Any] = Field(description="As in the request.")
    parallel_tool_calls: bool = Field(description="As in the request.")
    prompt_cache_key: str | None = Field(description="As in the request.")
    safety_identifier: str | None = Field(description="As in the request.")
    temperature: float | None = Field(description="As in the request.")
    text: ResponseText = Field(description="As in the request.")
    tool_choice: ToolChoice = Field(description="As in the request.")
    tools: list[FunctionTool] = Field(description="As in the request.")
    top_logprobs: int = Field(description="As in the request.")
    top_p: float | None = Field(description="As in the request.")
    user: str | None = Field(description="As in the request.")
    background: Literal[False] = Field(description="Always false.")
    previous_response_id: None = Field(description="Always null: nothing is stored.")
    reasoning: NoReasoning = Field(description="There is no reasoning.")
    service_tier: Literal["default"]
    store: Literal[False] = Field(description="Always false.")
    truncation: Literal["disabled"]


class Numbered(Answered):
    sequence_number: int = Field(description="The number of the event within the stream.")


class ResponseChanged(Numbered):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ] = Field(description="One of the first two of a stream, or the last, which says how it ended.")
    response: Response = Field(description="The answer so far.")


class ItemChanged(Numbered):
    type: Literal["response.output_item.added", "response.output_item.done"] = Field(
        description="Whether the item starts or ends."
    )
    output_index: int = Field(description="The number of the item within output.")
    item: Output = Field(description="The item so far.")


class Within(Numbered):
    item_id: str = Field(description="The id of the item.")
    output_index: int = Field(description="The number of the item within output.")


class WithinText(Within):
    content_index: int = Field(description="Always 0.")


class PartChanged(WithinText):
    type: Literal["response.content_part.added", "response.content_part.done"] = Field(
        description="Whether the text starts or ends."
    )
    part: OutputText = Field(description="The text so far.")


class TextDelta(WithinText):
    type: Literal["response.output_text.delta"]
    delta: str = Field(description="More text.")
    logprobs: list[LikelyToken] = Field(description="Of the new tokens.")


class TextDone(WithinText):
    type: Literal["response.output_text.done"]
    text: str = Field(description="The whole text.")
    logprobs: list[LikelyToken] = Field(description="Of all tokens.")


class ArgumentsDelta(Within):
    type: Literal["response.function_call_arguments.delta"]
    delta: str = Field(description="The next part of the arguments, as JSON.")


class ArgumentsDone(Within):
    type: Literal["response.function_call_arguments.done"]
    name: str = Field(description="The function's name.")
    arguments: str = Field(description="All arguments, as JSON.")


class CanvasShown(Numbered, View):
    """The canvas after a forward, in a stream with include_canvas."""

    type: Literal["diffusion.canvas"]


class ResponsesEvent(
    RootModel[
        Annotated[
            ResponseChanged
            | ItemChanged
            | PartChanged
            | TextDelta
            | TextDone
            | ArgumentsDelta
            | ArgumentsDone
            | CanvasShown,
            Discriminator("type"),
        ]
    ]
):
    """The data of one event of a stream."""
