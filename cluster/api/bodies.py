"""Request bodies, with the names of OpenAI and vLLM; invalid fields are refused by name."""

from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from diffray.cluster.api.errors import ApiError, invalid, of_validation
from diffray.cluster.api.noop_fields import refuse_unless_neutral
from diffray.components.policy import DiffusionParams

_MOST_PROMPTS: Final = 1024
_MOST_MESSAGES: Final = 4096
_MOST_TOKENS: Final = 2**20  # to decode
_LONGEST_WORD: Final = 1000  # characters
_INT64: Final = 2**63
_NOTED: Final = "Accepted, and without effect."
_SANE: Final = 2**31  # no length or priority is larger


def _as_prompts(given: Any) -> list[str | list[int]]:
    """Return several prompts; a text or a flat list of ids is one."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if _are_ids(given):
            return [given]
        if len(given) > _MOST_PROMPTS:
            raise ValueError(f"at most {_MOST_PROMPTS} prompts go into one request")
        if all(
            isinstance(each, str) or (isinstance(each, list) and _are_ids(each)) for each in given
        ):
            return given
    raise ValueError("expected a text, a list of token ids, or a list of several of these")


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and all(type(token) is int for token in given)


def _as_stops(given: Any) -> list[str]:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("expected a text or a list of texts")
    if len(stops) > 32 or any(not 0 < len(stop) <= 1000 for stop in stops):
        raise ValueError("at most 32 stop strings are allowed, each of 1 to 1000 characters")
    return stops


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


Ids = list[int]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_as_prompts, json_schema_input_type=str | list[str] | Ids | list[Ids]),
]
Stops = Annotated[list[str], PlainValidator(_as_stops, json_schema_input_type=str | list[str])]
Biases = Annotated[
    dict[int, float], PlainValidator(_as_biases, json_schema_input_type=dict[str, float])
]
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TEXT: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "additionalProperties": False,
}
_CALL: Final = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}
# Report only a list's first mistake; a message for each of millions would take gigabytes.
TokenIds = Annotated[list[int], Field(max_length=1024, fail_fast=True)]
Messages = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "maxItems": _MOST_MESSAGES,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string", "enum": list(ROLES)},
                    "content": {
                        "anyOf": [
                            {"type": "string"},
                            {"type": "array", "items": _TEXT},
                            {"type": "null"},
                        ]
                    },
                    "tool_calls": {"type": "array", "items": _CALL},
                    "tool_call_id": {"type": "string"},
                    "name": {"type": "string"},
                },
                "additionalProperties": False,
            },
        }
    ),
]
Tools = list[dict[str, Any]]
Word = Annotated[str, Field(min_length=1, max_length=_LONGEST_WORD)]


class Body(BaseModel):
    """Strict: a number in quotes is not a number."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class StreamOptions(Body):
    """What a stream contains besides the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="Usage so far, in every chunk.")
    include_canvas: bool = Field(False, description="Chunks without choices show live canvases.")
    include_obfuscation: bool = Field(False, description=_NOTED)


class GenerationBody(Body):
    """The fields that chats and completions share; the server fills in what is missing."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, lt=_SANE)
    min_tokens: int = Field(0, ge=0, lt=_SANE)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT64, description="0 and -1: all tokens.")
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: Stops = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: Biases = Field(default_factory=dict)
    allowed_token_ids: list[int] = Field(default_factory=list, max_length=65536, fail_fast=True)
    bad_words: list[Word] = Field(
        default_factory=list,
        max_length=256,
        fail_fast=True,
        description="Each must be a single token.",
    )
    priority: int = Field(
        0,
        ge=-_SANE,
        lt=_SANE,
        description="Lower runs first, where the server's scheduling policy is priority.",
    )
    cache_salt: str = Field(
        "", max_length=1024, description="K/V are shared with requests of the same salt alone."
    )
    # Notes of the client or for OpenAI; they change no token.
    user: str | None = Field(None, description=_NOTED)
    safety_identifier: str | None = Field(None, description=_NOTED)
    prompt_cache_key: str | None = Field(None, description=_NOTED)
    prompt_cache_retention: str | None = Field(None, description=_NOTED)
    service_tier: str | None = Field(None, description=_NOTED)
    store: bool | None = Field(None, description=_NOTED)
    metadata: dict[str, Any] | None = Field(None, description=_NOTED)
    request_id: str | None = Field(
        None, pattern=r"^[\x21-\x7e]{1,128}$", description="Ends the answer's id."
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_trajectory: bool = Field(
        False, description="Tell each token's id, the step at which it became final, its logprob."
    )
    diffusion: DiffusionParams = Field(
        default=DiffusionParams(), description="How to denoise: decoder, cache and so on."
    )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, lt=_SANE)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: Tools = Field(
        default_factory=list,
        max_length=1024,
        fail_fast=True,
        description='The template shows them to the model; needs tool_choice: "none".',
    )
    tool_choice: Any = Field(None, json_schema_extra={"enum": ["none"]})
    parallel_tool_calls: bool | None = Field(None, description=_NOTED)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    suffix: str | None = Field(None, description="Text to go on with: infilling.")
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool = True


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: Tools = Field(default_factory=list, max_length=1024, fail_fast=True)
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int] = Field(max_length=_MOST_TOKENS, fail_fast=True)


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], given: object) -> AnyBody:
    """Return a body, or refuse it and name the mistake; null means the default."""
    if not isinstance(given, dict):
        raise invalid("the body must be a JSON object")
    body = {name: value for name, value in given.items() if value is not None}
    for name in [name for name in body if name not in kind.model_fields]:
        refuse_unless_neutral(str(name), body.pop(name), body, kind.model_fields)
    missing = [n for n, f in kind.model_fields.items() if f.is_required() and n not in body]
    if missing:
        raise ApiError(
            400,
            f"{missing[0]} is required",
            param=missing[0],
            code="missing_required_parameter",
        )
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise of_validation(error) from None
