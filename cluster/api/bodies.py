"""Request bodies, with the names of OpenAI and vLLM; invalid fields are refused by name."""

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, ValidationError, create_model, model_validator

from diffray.cluster.api.errors import invalid
from diffray.cluster.api.fields import (
    EFFORT,
    NOTED,
    Biases,
    Message,
    NamedTool,
    Prompts,
    ResponseFormat,
    Stops,
    StrictModel,
    TokenIds,
    Tool,
    ToolChoice,
    Word,
)
from diffray.cluster.api.settings import GenerationDefaults
from diffray.components.config import InvalidField, explain, not_given
from diffray.components.grammar.json_schema import AnySchema
from diffray.components.grammar.structured import StructuredOutputs
from diffray.components.grammar.tool_calls import ToolCalls
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams

_MOST_CHOICES: Final = 1024  # of one request
MOST_MESSAGES: Final = 4096
_SANE: Final = 2**31  # no length or priority is larger

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


Named = Annotated[
    str | None, Field(description="The model's name in /v1/models; default: the only one.")
]


class ModelBody(StrictModel):
    """What names the model, if several are served."""

    model: Named = None


class StreamOptions(StrictModel):
    """What a stream contains besides text."""

    include_usage: bool = Field(False, description="Add a last chunk with the usage.")
    continuous_usage_stats: bool = Field(False, description="Add the usage so far to every chunk.")
    include_canvas: bool = Field(False, description="Add chunks with the current canvas.")
    include_obfuscation: bool = Field(False, description=NOTED)


# Numbers and switches of SamplingParams, except those of which each API has its own.
_SCALARS: Final = (int, float, bool, int | None)
_OWN: Final = ("n", "max_tokens", "logprobs", "top_logprobs")
_SAMPLING: Final = [
    name
    for name, field in SamplingParams.model_fields.items()
    if field.annotation in _SCALARS and name not in _OWN
]

if TYPE_CHECKING:
    _Sampling = StrictModel
else:
    _SERVERS = [name for name in GenerationDefaults.model_fields if name in _SAMPLING]
    _FIELDS = not_given(SamplingParams, _SAMPLING, " Default: {default}.")
    _FIELDS |= not_given(SamplingParams, _SERVERS)  # whose defaults are the server's
    _Sampling = create_model("_Sampling", __base__=StrictModel, **_FIELDS)


class SharedFields(_Sampling):
    """The fields that mean the same in every API; a description may be that of SamplingParams."""

    if TYPE_CHECKING:
        min_tokens: int | None = None
        temperature: float | None = None
        top_p: float | None = None

    model: Named = None
    strict_max_tokens: bool | None = Field(
        None,
        description="Whether a max_tokens that the context has no room for is refused. If not, it "
        "is lowered, and the answer and the header X-Diffray-Warnings say so. Default: only in "
        "completions.",
    )
    stop_token_ids: TokenIds = Field(default_factory=list)
    logit_bias: Biases = Field(default_factory=dict)
    allowed_token_ids: list[int] = Field(default_factory=list, max_length=65536, fail_fast=True)
    bad_words: Annotated[list[Word], Field(max_length=256, fail_fast=True)] = Field(
        default_factory=list
    )
    priority: int = Field(
        0,
        ge=-_SANE,
        lt=_SANE,
        description='Lower runs first; needs the scheduling policy "priority".',
    )
    cache_salt: str = Field(
        "", max_length=1024, description="K/V are shared only between requests with the same salt."
    )
    structured_outputs: StructuredOutputs | None = None
    # Notes of the client for itself, or for OpenAI.
    user: str | None = Field(None, description=NOTED)
    safety_identifier: str | None = Field(None, description=NOTED)
    prompt_cache_key: str | None = Field(None, description=NOTED)
    prompt_cache_retention: str | None = Field(None, description=NOTED)
    service_tier: str | None = Field(None, description=NOTED)
    store: bool | None = Field(None, description=NOTED)
    metadata: dict[str, Any] | None = Field(None, description=NOTED)
    request_id: str | None = Field(
        None, pattern=r"^[\x21-\x7e]{1,128}$", description="The last part of the answer's id."
    )
    stream: bool = Field(False, description="Send the answer in chunks, as it becomes final.")
    diffusion: DiffusionParams = Field(
        default=DiffusionParams(), description="How to denoise: decoder, cache and so on."
    )


class GenerationBody(SharedFields):
    """The fields that chats and completions share."""

    prompt_field: ClassVar[str]
    default_tokens: ClassVar[int]  # if neither the request nor the server sets max_tokens
    strict_by_default: ClassVar[bool] = True  # about max_tokens

    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, lt=_SANE)
    stop: Stops = Field(default_factory=list)
    response_format: ResponseFormat | None = Field(
        None, description="JSON: any object, or what a schema allows."
    )
    guided_json: AnySchema = Field(None, description="The same as structured_outputs.json.")
    guided_regex: str | None = Field(None, description="The same as structured_outputs.regex.")
    guided_choice: list[str] | None = Field(
        None, description="The same as structured_outputs.choice."
    )
    guided_grammar: str | None = Field(None, description="The same as structured_outputs.grammar.")
    stream_options: StreamOptions | None = Field(None, description="Needs stream: true.")
    return_token_ids: bool = Field(False, description="Return the ids of prompt and answer too.")
    return_trajectory: bool = Field(
        False,
        description="Return each token's id, its log-probability and the step that made it final.",
    )

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def is_strict(self) -> bool:
        """Whether a max_tokens beyond the context is refused, instead of lowered."""
        given = self.strict_max_tokens
        return self.strict_by_default if given is None else given

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives each token's log-probability comes with; None: no logprobs."""
        raise NotImplementedError

    @cached_property
    def structured(self) -> tuple[str, StructuredOutputs] | None:
        """The field that constrains the answer's text, and its constraint."""
        found = self._structures()
        if len(found) > 1:
            _, other, *_ = found
            raise invalid(f"{' and '.join(found)} exclude each other; send one of them", other)
        return next(iter(found.items()), None)

    def _structures(self) -> dict[str, StructuredOutputs]:
        """Return the constraint of each field that has one for the answer's text."""
        form = self.response_format
        found = {
            "structured_outputs": self.structured_outputs,
            "response_format": None if form is None else form.structured,
        }
        for kind in ("json", "regex", "choice", "grammar"):
            name = f"guided_{kind}"
            if (value := getattr(self, name)) is not None:
                try:
                    found[name] = StructuredOutputs.model_validate({kind: value})
                except ValidationError as error:
                    raise InvalidField(explain(error, {kind: name}), name) from None
        return {field: outputs for field, outputs in found.items() if outputs is not None}

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        # An ApiError passes through pydantic unchanged.
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream: true", "stream_options")
        return self


class TemplateFields(StrictModel):
    """The fields that control the chat template."""

    add_generation_prompt: bool = Field(
        True, description="End the prompt where the assistant's answer begins."
    )
    continue_final_message: bool = Field(
        False, description="Continue the last message instead of answering it."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Values for the chat template."
    )
    reasoning_effort: ReasoningEffort | None = Field(None, description=EFFORT)
    tools: Tools = Field(
        default_factory=list, description="Functions that the template shows to the model."
    )

    @property
    def shown_tools(self) -> Tools:
        return self.tools


class ChatBody(GenerationBody, TemplateFields):
    """Answer a conversation, as OpenAI's chat completions do.

    With `stream: true` the answer comes as server-sent events, of which the last is `[DONE]`; an
    error after the first chunk is an event with an `error`.
    """

    prompt_field = "messages"
    default_tokens = 512  # as many as fit the context, but no more than this
    strict_by_default = False

    messages: Messages = Field(description="The conversation so far.")
    max_completion_tokens: int | None = Field(
        None, ge=1, lt=_SANE, description="The newer name of max_tokens."
    )
    logprobs: bool = Field(False, description="Return each token's log-probability.")
    top_logprobs: int = Field(0, ge=0, le=20)
    add_special_tokens: bool = Field(
        False, description="Add the tokenizer's special tokens to the template's text."
    )
    tool_choice: ToolChoice | None = Field(
        None, description="Whether an answer may, must or must not call a function, or which one."
    )
    parallel_tool_calls: bool = Field(True, description="Whether there may be several calls.")

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_completion_tokens and self.max_tokens not in (None, self.max_completion_tokens):
            raise invalid(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens "
                f"({self.max_completion_tokens}) mean the same; send one of them",
                "max_completion_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise invalid("tool_choice needs tools", "tool_choice")
        names = [tool.function.name for tool in self.tools]
        if self.named_tool is not None and self.named_tool not in names:
            raise invalid(f"no tool is called {self.named_tool[:64]!r}", "tool_choice")
        if len({*names}) < len(names):
            raise invalid("two tools have the same name", "tools")
        return self

    @property
    def named_tool(self) -> str | None:
        """The only function that may be called, if one is named."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedTool) else None

    @property
    def shown_tools(self) -> Tools:
        """The tools in the prompt: a model that sees some may call them whatever the choice."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def calls(self) -> bool:
        """Whether the answer may have calls."""
        return bool(self.shown_tools)

    def _structures(self) -> dict[str, StructuredOutputs]:
        if not self.calls:
            return super()._structures()
        only = self.named_tool
        functions = {
            tool.function.name: tool.function.parameters
            for tool in self.tools
            if only in (None, tool.function.name)
        }
        calls = ToolCalls(
            functions=functions,
            text=self.tool_choice in (None, "auto"),
            several=self.parallel_tool_calls and only is None,
        )
        return {"tools": StructuredOutputs(tool_calls=calls)} | super()._structures()


class CompletionBody(GenerationBody):
    """Continue a text, or with `suffix` fill a gap in one, as OpenAI's completions do.

    Streams are as in `/v1/chat/completions`.
    """

    prompt_field = "prompt"
    default_tokens = 16  # OpenAI's

    prompt: Prompts = Field(description="A text, a list of token ids, or a list of several.")
    suffix: str | None = Field(None, description="Text after the gap to fill (infilling).")
    echo: bool = Field(False, description="Repeat prompt and suffix in the answer's text.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="Return each token's log-probability, and those of this many alternatives.",
    )
    add_special_tokens: bool = Field(
        True, description="Add the tokenizer's special tokens to the prompt."
    )

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        return self.echo and self.logprobs is not None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.scores_prompt and (self.stream or self.suffix is not None):
            other = "stream" if self.stream else "suffix"
            raise invalid(f"echo with logprobs does not go with {other}; leave it out", other)
        if len(self.prompt) * self.n > _MOST_CHOICES:
            raise invalid(
                f"n ({self.n}) for each of {len(self.prompt)} prompts is more than "
                f"{_MOST_CHOICES} choices; send several requests",
                "n",
            )
        return self
