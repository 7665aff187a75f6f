"""Examples in the OpenAPI document: requests that demo models answer correctly, answers, errors."""

import json
from typing import Final

from pydantic import BaseModel

from diffray.cluster.api import answer_models as answers
from diffray.cluster.api.anthropic import Messages
from diffray.cluster.api.anthropic_models import MessagesAnswer, MessagesEvent
from diffray.cluster.api.dialects import Dialect
from diffray.cluster.api.errors import ApiError, Json, bug, unavailable
from diffray.cluster.api.operations import (
    JOIN_TRAINER,
    LEAVE_TRAINER,
    LOAD_ADAPTER,
    RECEIVE_WEIGHTS,
    UNLOAD_ADAPTER,
    UPDATE_WEIGHTS,
)
from diffray.cluster.api.responses import Responses
from diffray.cluster.api.responses_models import Response, ResponsesEvent
from diffray.cluster.control.quarantine import REASON
from diffray.components.checkpoints.demos import EXAMPLE, FACTS, FUNCTION


def _asked(text: str, **more: object) -> Json:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 96, **more}


def _example(summary: str, value: Json) -> Json:
    return {"summary": summary, "value": value}


_FACTS: Final = {
    "type": "object",
    "properties": {
        "job": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["job", "age"],
}
_WEATHER: Final = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}
_ASKED_WEATHER: Final = "How is the weather in Oslo?"
_WEATHER_TOOL: Final = {
    "name": _WEATHER["name"],
    "description": _WEATHER["description"],
    "input_schema": _WEATHER["parameters"],
}
_WATCH: Final = {"include_canvas": True, "include_usage": True}

REQUESTS: Final[dict[str, dict[str, Json]]] = {
    "/v1/chat/completions": {
        "question": _example("A question", _asked(FUNCTION)),
        "denoising": _example(
            "How to denoise: blocks, decoder and cache",
            _asked(
                EXAMPLE,
                diffusion={
                    "block_length": 32,
                    "decoder": {"kind": "threshold", "threshold": 0.9},
                    "cache": {"kind": "none"},
                },
            ),
        ),
        "stream": _example(
            "Every step as it happens: a stream with the canvas",
            _asked(FUNCTION, stream=True, stream_options=_WATCH),
        ),
        "json": _example(
            "JSON that a schema allows",
            _asked(
                FACTS,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "facts", "schema": _FACTS},
                },
            ),
        ),
        "sampling": _example(
            "Two answers sampled with a seed, with log-probabilities and the step of each token",
            _asked(FUNCTION, n=2, temperature=0.7, seed=1, logprobs=True, return_trajectory=True),
        ),
        "tools": _example(
            "A function call",
            _asked(
                _ASKED_WEATHER,
                tools=[{"type": "function", "function": _WEATHER}],
                tool_choice="required",
            ),
        ),
    },
    "/v1/completions": {
        "text": _example("A text to continue", {"prompt": "def add(a, b):", "max_tokens": 32}),
        "gap": _example(
            "A gap of 16 tokens to fill, for models with bidirectional attention",
            {"prompt": "def add(a, b):", "suffix": "    return total", "max_tokens": 16},
        ),
        "several": _example(
            "Several prompts, as texts or token ids",
            {"prompt": ["The first letter is", "The last letter is"], "max_tokens": 8},
        ),
    },
    "/v1/responses": {
        "question": _example("A question", {"input": FUNCTION, "max_output_tokens": 96}),
        "stream": _example(
            "Every step as it happens: a stream with the canvas",
            {
                "input": FUNCTION,
                "max_output_tokens": 96,
                "stream": True,
                "stream_options": {"include_canvas": True},
            },
        ),
        "json": _example(
            "JSON that a schema allows",
            {
                "input": FACTS,
                "max_output_tokens": 96,
                "text": {"format": {"type": "json_schema", "name": "facts", "schema": _FACTS}},
            },
        ),
        "tools": _example(
            "A function call",
            {
                "input": _ASKED_WEATHER,
                "max_output_tokens": 96,
                "tools": [{"type": "function", **_WEATHER}],
                "tool_choice": "required",
            },
        ),
    },
    "/v1/messages": {
        "question": _example("A question", _asked(FUNCTION)),
        "stream": _example("A stream", _asked(FUNCTION, system="Be brief.", stream=True)),
        "json": _example(
            "JSON that a schema allows",
            _asked(FACTS, output_config={"format": {"type": "json_schema", "schema": _FACTS}}),
        ),
        "tools": _example(
            "A function call",
            _asked(_ASKED_WEATHER, tools=[_WEATHER_TOOL], tool_choice={"type": "any"}),
        ),
    },
    "/v1/messages/count_tokens": {
        "chat": _example("A conversation", {"messages": [{"role": "user", "content": FACTS}]}),
    },
    "/tokenize": {
        "text": _example("A text", {"prompt": FACTS, "return_token_strs": True}),
        "chat": _example("A conversation", {"messages": [{"role": "user", "content": FACTS}]}),
    },
    "/detokenize": {"tokens": _example("Tokens", {"tokens": [3, 14, 15]})},
    UPDATE_WEIGHTS: {
        "demo": _example("The weights of the same checkpoint", {"model_path": "demo"}),
    },
    JOIN_TRAINER: {
        "one": _example(
            "One rank and a trainer",
            {
                "master_address": "10.0.0.5",
                "master_port": 29600,
                "rank_offset": 1,
                "world_size": 2,
            },
        ),
    },
    RECEIVE_WEIGHTS: {
        "head": _example(
            "One of the model's tensors",
            {"names": ["lm_head.weight"], "dtypes": ["bfloat16"], "shapes": [[4096, 256]]},
        ),
    },
    LEAVE_TRAINER: {"default": _example("The group with the default name", {})},
    LOAD_ADAPTER: {
        "adapter": _example("A PEFT folder", {"lora_name": "mine", "lora_path": "/my/lora"}),
    },
    UNLOAD_ADAPTER: {"adapter": _example("An adapter", {"lora_name": "mine"})},
}

_ENVELOPE: Final = {
    "created": 1790000000,
    "model": "demo",
    "system_fingerprint": "diffray-0.1.0",
}
_USAGE: Final = {
    "prompt_tokens": 30,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens": 24,
    "total_tokens": 54,
}
_SAID: Final = '{"job": "nurse", "age": 31}'
_EFFORT: Final = {"forwards": 6, "tokens_per_forward": 4.0}
_END: Final = {"logprobs": None, "finish_reason": "stop", "stop_reason": None}
_CHAT: Final = {"id": "chatcmpl-1", "object": "chat.completion", **_ENVELOPE}
_TEXT: Final = {"id": "cmpl-1", "object": "text_completion", **_ENVELOPE}


def _chunks(envelope: Json, *parts: Json) -> list[Json]:
    """Return the chunks of a stream."""
    ends: Json = {"choices": [], "usage": _USAGE, "diffusion": _EFFORT}
    return [envelope | part for part in (*parts, ends)]


def _sent(chunks: list[Json]) -> str:
    """Return a stream as it is sent."""
    texts = [json.dumps(chunk) for chunk in chunks]
    return "".join(f"data: {text}\n\n" for text in [*texts, "[DONE]"])


def _typed(dialect: Dialect, chunks: list[Json]) -> str:
    """Return a chat's stream as another API sends it."""
    made = [each for chunk in chunks for each in dialect.events(chunk)]
    sent = (_at_its_time(each) for each in (*made, *dialect.last_events()))
    return "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in sent)


def _at_its_time(made: Json) -> Json:
    """Return an answer or event of Responses with the example's time of completion, not now."""
    if made.get("completed_at"):
        return made | {"completed_at": made["created_at"] + 1}
    return made | {"response": _at_its_time(made["response"])} if "response" in made else made


_VIEW: Final[Json] = {
    "choices": [],
    "usage": None,
    "diffusion": {
        "index": 0,
        "forwards": 1,
        "canvas": [512, None, 77],
        "tokens": ['{"', None, '":'],
        "text": '{"\N{LIGHT SHADE}":',
    },
}
_INPUT: Final = {"input": FACTS}
_MESSAGE: Final = {"role": "assistant", "content": _SAID, "refusal": None}
_ANSWER: Final[Json] = _CHAT | {
    "choices": [{"index": 0, "message": _MESSAGE, **_END}],
    "usage": _USAGE,
    "diffusion": _EFFORT,
}
_NEW: Final = {"delta": {"content": _SAID}, "logprobs": None, "finish_reason": None}
_STREAM: Final = _chunks(
    _CHAT | {"object": "chat.completion.chunk"},
    _VIEW,
    {"choices": [{"index": 0, **_NEW}]},
    {"choices": [{"index": 0, "delta": {}, **_END}]},
)
_COUNTED: Final = [chunk | {"usage": _USAGE} for chunk in _STREAM[1:]]
ANSWERS: Final[dict[type[BaseModel], Json | str]] = {
    answers.ChatCompletion: _ANSWER,
    answers.ChatEvent: _sent(_STREAM),
    answers.Completion: _TEXT
    | {
        "choices": [{"index": 0, "text": " return a + b", **_END}],
        "usage": _USAGE,
        "diffusion": _EFFORT,
    },
    answers.CompletionEvent: _sent(
        _chunks(
            _TEXT,
            _VIEW,
            {
                "choices": [
                    {"index": 0, "text": " return", "logprobs": None, "finish_reason": None},
                ]
            },
            {"choices": [{"index": 0, "text": "", **_END}]},
        )
    ),
    Response: _at_its_time(Responses(_INPUT).whole(_ANSWER)),
    ResponsesEvent: _typed(Responses(_INPUT), _STREAM),
    MessagesAnswer: Messages(_asked(FACTS)).whole(_ANSWER),
    MessagesEvent: _typed(Messages(_asked(FACTS)), _COUNTED),
}

ERRORS: Final[dict[int, ApiError]] = {
    400: ApiError(
        400,
        "temperature: Input should be greater than or equal to 0 (given: -1)",
        param="temperature",
        code="invalid_value",
    ),
    401: ApiError(
        401,
        "Incorrect API key provided; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
        code="invalid_api_key",
    ),
    403: ApiError(
        403,
        "This path needs an operator's key, and this API key is not one.",
        code="not_an_operator",
    ),
    404: ApiError(
        404,
        "The model `nothing` does not exist; this is `demo`.",
        param="model",
        code="model_not_found",
    ),
    408: ApiError(
        408, "The body was not complete after 60 seconds; send it faster.", code="request_timeout"
    ),
    413: ApiError(
        413,
        "The request is larger than 8388608 bytes; send less at a time.",
        code="request_too_large",
    ),
    415: ApiError(
        415,
        "The body must be JSON; send it with the header Content-Type: application/json.",
        code="unsupported_media_type",
    ),
    422: ApiError(422, REASON, code="request_ends_engine"),
    429: ApiError(
        429,
        "the queue is full (256 requests are waiting, 16 are running); try again later",
        code="rate_limit_exceeded",
    ),
    500: bug(),
    503: unavailable("No replica could answer; try again."),
    504: ApiError(504, "the answer was not complete after 60 s", code="deadline_exceeded"),
}
