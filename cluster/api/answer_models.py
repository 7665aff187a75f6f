"""The endpoints' answers, for the OpenAPI document; tests check real answers against them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel


class Answered(BaseModel):
    """An object of an answer. Fields with a default are present only if their meaning says so."""

    model_config = ConfigDict(extra="forbid")


class Mistake(Answered):
    message: str = Field(description="What is wrong, and how to fix it.")
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"] = Field(
        description="The type of error, in OpenAI's terms."
    )
    param: str | None = Field(description="The field at fault, such as diffusion.decoder.")
    code: str | None = Field(description="A name for the kind of error, for programs.")


class Refusal(Answered):
    """The body of every error except those of Anthropic's API."""

    error: Mistake = Field(description="The error.")


class AnthropicMistake(Answered):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
        "timeout_error",
    ] = Field(description="The type of error, in Anthropic's terms.")
    message: str = Field(description="What is wrong, and how to fix it.")


class AnthropicRefusal(Answered):
    """The body of every error of Anthropic's API, and the event that ends a broken stream."""

    type: Literal["error"] = Field(description="Always error.")
    error: AnthropicMistake = Field(description="The error.")


class PromptDetails(Answered):
    cached_tokens: int = Field(description="Tokens of the prompt whose K/V were shared.")
    approximate: bool = Field(
        False, description="With first_step_caching approx: an answer read K/V of another prompt."
    )


class Usage(Answered):
    """Tokens of the request and of all its choices."""

    prompt_tokens: int = Field(description="Tokens of the prompt.")
    prompt_tokens_details: PromptDetails = Field(description="Details about these tokens.")
    completion_tokens: int = Field(description="Tokens of the answers, with their end tokens.")
    total_tokens: int = Field(description="The sum of both.")


class Effort(Answered):
    """The work that the answer took."""

    forwards: int = Field(description="Forward passes of the model, over all choices.")
    tokens_per_forward: float = Field(description="Tokens of the answers per forward pass.")


class View(Answered):
    """The canvas of one choice after a forward, in a stream with include_canvas."""

    index: int = Field(description="The number of the choice.")
    forwards: int = Field(description="Forward passes so far.")
    canvas: list[int | None] = Field(description="Token ids of all positions; null: masked.")
    tokens: list[str | None] = Field(description="The same tokens as texts.")
    text: str = Field(description="The text of the canvas, with a symbol for each mask.")


class Trajectory(Answered):
    """The steps and log-probabilities at which tokens became final, in parallel lists."""

    token_ids: list[int] = Field(description="The tokens.")
    steps: list[int] = Field(description="The step at which each became final.")
    logprobs: list[float] = Field(description="Its log-probability at that step.")
    weight_version: str = Field(description="The version of the weights that generated them.")


class Likely(Answered):
    token: str = Field(description="The token's text.")
    logprob: float = Field(description="Its log-probability when the position became final.")
    bytes: list[int] = Field(description="The text's bytes, which may be part of a character.")


class LikelyToken(Likely):
    top_logprobs: list[Likely] = Field(description="The most probable tokens at its position.")


class ChatLogprobs(Answered):
    content: list[LikelyToken] = Field(description="One entry per token.")
    refusal: None = Field(description="Always null.")


class CompletionLogprobs(Answered):
    """Parallel lists with one entry per token."""

    tokens: list[str] = Field(description="The texts of the tokens.")
    token_logprobs: list[float] = Field(description="Their log-probabilities.")
    top_logprobs: list[dict[str, float]] = Field(
        description="Per position: the most probable tokens."
    )
    text_offset: list[int] = Field(description="Where each token begins in the choice's text.")


class CalledFunction(Answered):
    name: str | None = Field(None, description="The function's name; a stream sends it once.")
    arguments: str | None = Field(None, description="JSON; a stream sends it in parts.")


class Call(Answered):
    """A function call; a stream sends it in parts."""

    index: int | None = Field(None, description="The call's number; in streams only.")
    id: str | None = Field(None, description="The call's id, which its result repeats.")
    type: Literal["function"] | None = Field(None, description="Always function.")
    function: CalledFunction = Field(description="What to call.")


class AnswerMessage(Answered):
    role: Literal["assistant"] = Field(description="Always assistant.")
    content: str | None = Field(description="The text; null if there are only calls.")
    refusal: None = Field(description="Always null.")
    tool_calls: list[Call] | None = Field(None, description="Function calls, if any.")


class MessageDelta(Answered):
    role: Literal["assistant"] | None = Field(None, description="Only in the first chunk.")
    content: str | None = Field(None, description="More text.")
    tool_calls: list[Call] | None = Field(None, description="Parts of calls.")


class PinnedField(Answered):
    probability: float = Field(description="The probability of its tokens, given their number.")
    options: dict[str, float] = Field(description="For a choice: the probability of each option.")


class Nested(Answered):
    exact: Literal[False] = Field(description="Always false: the grammar allows more texts.")
    depth: int = Field(description="The depth up to which its rules could nest.")


class MayNest(Answered):
    structured_outputs: Nested | None = Field(
        None, description="At the end, if a context-free grammar nests its rules without limit."
    )


class Choice(MayNest):
    """One of the `n` answers to one prompt."""

    index: int = Field(description="Its number, counted over all prompts.")
    finish_reason: Literal["stop", "length", "tool_calls"] | None = Field(
        description="Why it ended: stop (an end token or a stop text), length (max_tokens or the "
        "context) or tool_calls; null until it ends."
    )
    stop_reason: str | int | None = Field(
        None, description="The stop text or token id that was found; null for the model's own end."
    )
    token_ids: list[int] | None = Field(None, description="With return_token_ids: its token ids.")
    trajectory: Trajectory | None = Field(None, description="With return_trajectory.")
    fields: dict[str, PinnedField] | None = Field(
        None, description="With logprobs and a pinned canvas: each field by its path."
    )


class ChatChoice(Choice):
    message: AnswerMessage = Field(description="The answer.")
    logprobs: ChatLogprobs | None = Field(description="With logprobs.")


class ChatChunkChoice(Choice):
    delta: MessageDelta = Field(description="What is new.")
    logprobs: ChatLogprobs | None = Field(description="With logprobs, of the new tokens.")


class TextChoice(Choice):
    text: str = Field(description="The text; in a stream, its new part.")
    logprobs: CompletionLogprobs | None = Field(description="With logprobs.")
    prompt_token_ids: list[int] | None = Field(
        None, description="With return_token_ids: the prompt's tokens."
    )


class Warned(Answered):
    warnings: list[str] = Field([], description="What the server changed or ignored.")


class Envelope(Warned):
    id: str = Field(description="The answer's id, which ends in the request's request_id.")
    created: int = Field(description="When it began, in seconds since 1970.")
    model: str = Field(description="The model's name.")
    system_fingerprint: str = Field(description="The server's version.")


class ChatCompletion(Envelope):
    """A whole answer."""

    object: Literal["chat.completion"] = Field(description="Always chat.completion.")
    choices: list[ChatChoice] = Field(description="The answers.")
    usage: Usage = Field(description="Token counts.")
    diffusion: Effort = Field(description="The work it took.")
    prompt_token_ids: list[int] | None = Field(
        None, description="With return_token_ids: the prompt's tokens."
    )


class ChatChunk(Envelope):
    """The data of one event of a stream; the last event is [DONE]."""

    object: Literal["chat.completion.chunk"] = Field(description="Always chat.completion.chunk.")
    choices: list[ChatChunkChoice] = Field(description="What is new; empty next to a canvas.")
    usage: Usage | None = Field(None, description="With include_usage in the last chunk.")
    diffusion: View | Effort | None = Field(
        None, description="With include_canvas a canvas; with include_usage the effort, at the end."
    )
    prompt_token_ids: list[int] | None = Field(
        None, description="With return_token_ids, in the first chunk."
    )


class ChatEvent(RootModel[ChatChunk | Refusal]):
    """The data of an event of a stream: a chunk, or the error that ends it."""


class Completion(Envelope):
    """A whole answer."""

    object: Literal["text_completion"] = Field(description="Always text_completion.")
    choices: list[TextChoice] = Field(description="The answers to all prompts.")
    usage: Usage = Field(description="Token counts.")
    diffusion: Effort = Field(description="The work it took.")


class CompletionChunk(Envelope):
    """The data of one event of a stream; the last event is [DONE]."""

    object: Literal["text_completion"] = Field(description="Always text_completion.")
    choices: list[TextChoice] = Field(description="What is new; empty next to a canvas.")
    usage: Usage | None = Field(None, description="With include_usage in the last chunk.")
    diffusion: View | Effort | None = Field(
        None, description="With include_canvas a canvas; with include_usage the effort, at the end."
    )


class CompletionEvent(RootModel[CompletionChunk | Refusal]):
    """The data of an event of a stream: a chunk, or the error that ends it."""


class Accepts(Answered):
    iteration: list[str] = Field(description="The kinds of iterations that fit its attention.")
    cache: list[str] = Field(description="The kinds of caches that fit its attention.")
    suffix: bool = Field(description="Whether it takes a suffix, that is, fills gaps.")
    images: bool = Field(description="Whether it takes images in messages.")


class Policies(Answered):
    recommended: dict[str, Any] = Field(
        description="The diffusion parameters that are recommended."
    )
    source: str | None = Field(description="The source of the recommendation.")
    exact: list[str] = Field(description="Policies that compute what the model itself computes.")
    approximate: list[str] = Field(description="Policies that only approximate it.")


class Model(Answered):
    id: str = Field(description="The name to send as `model`.")
    object: Literal["model"] = Field(description="Always model.")
    created: int = Field(description="When its server was started, in seconds since 1970.")
    owned_by: Literal["diffray"] = Field(description="Always diffray.")
    root: str = Field(description="The first of its names.")
    parent: str | None = Field(description="For a LoRA adapter: the model that it adapts.")
    weight_version: str | None = Field(
        description="The version of its weights, 0 at first; null while it starts."
    )
    max_model_len: int = Field(description="The most tokens of a prompt and its answer.")
    family: str = Field(description="The family of the model, such as LLaDA or SDAR.")
    diffusion: dict[str, Any] = Field(
        description="The diffusion parameters of a request that sets none."
    )
    policies: Policies | None = Field(description="Advice for its family; null while it starts.")
    description: str | None = Field(description="What a demo model is and knows.")
    examples: list[str] = Field(description="Prompts to try.")
    accepts: Accepts | None = Field(description="What policies may hold; null while it starts.")


class ModelList(Answered):
    object: Literal["list"] = Field(description="Always list.")
    data: list[Model] = Field(description="The model under each of its names.")


class Tokenized(Warned):
    count: int = Field(description="How many tokens the text has.")
    max_model_len: int = Field(description="The most tokens of a prompt and its answer.")
    tokens: list[int] = Field(description="Their ids.")
    token_strs: list[str] | None = Field(description="With return_token_strs: their spellings.")


class Detokenized(Warned):
    prompt: str = Field(description="The text of the tokens.")


class TokenizerInfo(BaseModel):
    """The settings that remote tokenizers need, with the special tokens by name."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str = Field(description="The class in transformers.")
    model_max_length: int = Field(description="The most tokens of a prompt and its answer.")
    chat_template: str | None = Field(description="The Jinja template of conversations.")
    bos_token: str | None = Field(description="The token before a text.")
    eos_token: str | None = Field(description="The token after a text.")
    pad_token: str | None = Field(description="The token that pads a batch.")


class Version(Answered):
    version: str = Field(description="diffray's version.")


class Operation(Answered):
    success: Literal[True] = Field(description="Always true; failures are errors.")
    message: str = Field(description="What was done.")


class UpdatedWeights(Operation):
    weight_version: str = Field(description="The version of the new weights.")


class Sleeping(Answered):
    is_sleeping: bool = Field(description="Whether the model has given memory back.")


class EngineLoad(Answered):
    server_load: int = Field(description="Requests that run or wait.")
    running: int = Field(description="Requests that run.")
    waiting: int = Field(description="Requests in the queue.")
    free_pages: int = Field(description="Pages of the K/V memory that are free.")
    num_pages: int = Field(description="Pages of the K/V memory, free or not.")
