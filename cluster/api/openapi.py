"""The OpenAPI document: what the endpoints read, answer and refuse."""

from typing import Final, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from diffray.cluster.api import answer_models as answers
from diffray.cluster.api import anthropic_models, responses_models
from diffray.cluster.api.anthropic_body import CountTokensBody, MessagesBody
from diffray.cluster.api.api_examples import ANSWERS, ERRORS, REQUESTS
from diffray.cluster.api.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SharedFields,
    TokenizeBody,
)
from diffray.cluster.api.chat_messages import NOTED, StrictModel
from diffray.cluster.api.errors import Json
from diffray.cluster.api.noop_fields import noop_schemas
from diffray.cluster.api.operations import (
    IS_SLEEPING,
    JOIN_TRAINER,
    LEAVE_TRAINER,
    LOAD_ADAPTER,
    OPERATED,
    OPERATIONS,
    QUERIED,
    RECEIVE_WEIGHTS,
    SLEEP,
    UNLOAD_ADAPTER,
    UPDATE_WEIGHTS,
    WAKE_UP,
)
from diffray.cluster.api.responses_body import ResponsesBody
from diffray.components.params import SamplingParams

BODIES: Final[dict[str, type[StrictModel]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    **{path: OPERATIONS[path].given for path in OPERATED if path not in QUERIED},
}


QUERIES: Final[dict[str, type[StrictModel]]] = {path: OPERATIONS[path].given for path in QUERIED}


class About(NamedTuple):
    """A path's documentation: group, summary, text, and models of answer, event and refusal."""

    tag: str
    summary: str
    text: str = ""
    answer: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    refusal: type[BaseModel] = answers.Refusal


_ANSWERS, _MODELS, _TOKENS, _OPERATION = "Answers", "Models", "Tokens", "Operation"
_STREAM: Final = (
    "With `stream: true` the answer comes as server-sent events, each with a chunk in its `data`; "
    "the last is `[DONE]`. An error after the first chunk is an event with an `error`."
)
_TYPED_STREAM: Final = (
    "With `stream: true` the answer comes as server-sent events, each named after the `type` of "
    "its `data`. After the first event, an error is the last event."
)
ABOUT: Final[dict[str, About]] = {
    "/v1/chat/completions": About(
        _ANSWERS,
        "Answer a conversation",
        f"OpenAI's chat completions. {_STREAM}",
        answers.ChatCompletion,
        answers.ChatEvent,
    ),
    "/v1/completions": About(
        _ANSWERS,
        "Continue a text, or fill a gap",
        f"OpenAI's completions; with `suffix`, the text between prompt and suffix. {_STREAM}",
        answers.Completion,
        answers.CompletionEvent,
    ),
    "/v1/responses": About(
        _ANSWERS,
        "Answer a conversation, as OpenAI's Responses",
        f"A chat in the format of OpenAI's Responses. Nothing is stored. {_TYPED_STREAM}",
        responses_models.Response,
        responses_models.ResponsesEvent,
    ),
    "/v1/messages": About(
        _ANSWERS,
        "Answer a conversation, as Anthropic's Messages",
        f"A chat in the format of Anthropic's Messages. {_TYPED_STREAM}",
        anthropic_models.MessagesAnswer,
        anthropic_models.MessagesEvent,
        answers.AnthropicRefusal,
    ),
    "/v1/messages/count_tokens": About(
        _TOKENS,
        "Count the tokens of a conversation, as Anthropic's Messages",
        answer=anthropic_models.CountedTokens,
        refusal=answers.AnthropicRefusal,
    ),
    "/v1/models": About(_MODELS, "List the model", "", answers.ModelList),
    "/v1/models/{name}": About(_MODELS, "Show the model under one of its names", "", answers.Model),
    "/tokenize": About(_TOKENS, "Turn a text or a conversation into tokens", "", answers.Tokenized),
    "/detokenize": About(_TOKENS, "Turn tokens into a text", "", answers.Detokenized),
    "/tokenizer_info": About(_TOKENS, "Describe the tokenizer", "", answers.TokenizerInfo),
    UPDATE_WEIGHTS: About(
        _OPERATION,
        "Replace the weights of all replicas",
        "With those of a folder with the same model, while requests run; the path is SGLang's. No "
        "answer mixes versions. Weights that do not fit are refused, and nothing changes. Needs an "
        "operator's key.",
        answers.UpdatedWeights,
    ),
    JOIN_TRAINER: About(
        _OPERATION,
        "Join a trainer's torch.distributed group",
        "With the ranks of all replicas; the path is SGLang's. The trainer is rank 0, and the "
        "server needs the option `received_weights`. Needs an operator's key.",
        answers.Operation,
    ),
    RECEIVE_WEIGHTS: About(
        _OPERATION,
        "Replace the weights with those that a trainer broadcasts",
        "Call it while the trainer broadcasts the tensors; the path is SGLang's. Once all tensors "
        "have arrived, the weights are replaced as by /update_weights_from_disk. If they do not "
        "arrive, the old weights stay and the group ends. Needs an operator's key.",
        answers.UpdatedWeights,
    ),
    LEAVE_TRAINER: About(
        _OPERATION,
        "Leave a trainer's group",
        "Weights that have arrived only in part are dropped. Needs an operator's key.",
        answers.Operation,
    ),
    SLEEP: About(
        _OPERATION,
        "Give memory back",
        "On all replicas: that of the K/V, at level 2 that of the weights too; at level 1 the "
        "weights of a GPU move to the host's memory. Running requests end first. Requests that "
        "arrive meanwhile wait. Needs an operator's key.",
    ),
    WAKE_UP: About(
        _OPERATION,
        "Take the memory back",
        "After level 2 the newest weights are reloaded. Needs an operator's key.",
    ),
    IS_SLEEPING: About(
        _OPERATION, "Say whether the model sleeps", "Needs an operator's key.", answers.Sleeping
    ),
    LOAD_ADAPTER: About(
        _OPERATION,
        "Load a LoRA adapter",
        "On all replicas; from then on requests name it as their model. An adapter that does not "
        "fit is refused. Needs an operator's key.",
        answers.Operation,
    ),
    UNLOAD_ADAPTER: About(
        _OPERATION,
        "Unload a LoRA adapter",
        "Answers that have started with it continue. Needs an operator's key.",
        answers.Operation,
    ),
    "/health": About(_OPERATION, "Say whether the engine can answer", "Needs no key."),
    "/version": About(_OPERATION, "Report the version", "Needs no key.", answers.Version),
    "/load": About(_OPERATION, "Report how many requests run and wait", "", answers.EngineLoad),
    "/metrics": About(
        _OPERATION, "Report the metrics of all replicas", "In Prometheus' format. Needs no key."
    ),
}
_GUIDE: Final = (
    "The fields are those of OpenAI and vLLM. Those of diffusion models alone are under "
    "`diffusion`. A field that is unknown or out of range is refused with a 400 that names it; "
    "null means its default. With the server's option `--ignore-unknown-fields` unknown fields "
    "are ignored, and the answer's `warnings` name them. Fields that cannot change a token, such "
    "as `user` or `verbosity`, are accepted and have no effect. `/v1/models` "
    "says what each model is and lists prompts to try.\n\n"
    "If the server has keys, send one as `Authorization: Bearer KEY` or `x-api-key: KEY`. Each "
    "answer has an id in `X-Request-Id`: the request's own, if it has one."
)
_MEANINGS: Final = {
    400: "The request is invalid; the error names the field.",
    401: "No valid API key was sent; only on a server with keys.",
    403: "The path needs an operator's key, and this is not one, or the server has none.",
    404: "There is no such model.",
    408: "The body was not complete in time.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json.",
    422: "The request crashes the engine each time it runs.",
    429: "The queue is full; retry after Retry-After seconds.",
    500: "A bug in the server; see its log.",
    503: "The engine cannot answer now; retry after Retry-After seconds.",
    504: "The answer was not complete in time.",
}
_HEADERS: Final = {
    401: ("WWW-Authenticate", "Always Bearer.", "string"),
    429: ("Retry-After", "Seconds after which to try again.", "integer"),
    503: ("Retry-After", "Seconds after which to try again.", "integer"),
}
_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_REF: Final = "#/components/schemas/{model}"


def describe(
    app: FastAPI, *, has_keys: tuple[bool, bool], model: str | None = None, about: str = ""
) -> Json:
    """Return the app's OpenAPI schema, with the schemas of bodies and answers as components.

    `has_keys` says whether there are API keys and operators' keys. Examples of requests name
    `model`, if given; `about` comes before the guide.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    schema = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description="\n\n".join(filter(None, (about, _GUIDE))),
        routes=app.routes,
    )
    # FastAPI's refusal of a path's or query's parameter, which is never sent.
    for path in ("/v1/models/{name}", "/tokenizer_info"):
        del schema["paths"][path]["get"]["responses"]["422"]
    paths = sorted(schema["paths"], key=list(ABOUT).index)
    schema["paths"] = {path: schema["paths"][path] for path in paths}
    models: list[type[BaseModel]] = [*BODIES.values()]
    for path, operations in schema["paths"].items():
        (operation,) = operations.values()
        models += _describe_operation(operation, path)
        if model is not None and path in BODIES:
            content = operation["requestBody"]["content"]["application/json"]
            for example in content["examples"].values():
                example["value"] = {"model": model, **example["value"]}
    made = models_json_schema([(each, "validation") for each in models], ref_template=_REF)[1]
    schema["components"] = {"schemas": made["$defs"]}
    _fill_in_meanings(made["$defs"])
    for each in BODIES.values():
        if issubclass(each, SharedFields):
            _add_noop_fields(made["$defs"][each.__name__]["properties"])
    for_all, for_operators = has_keys
    needed: list[Json] = [{name: []} for name in _KEYS]
    if any(has_keys):
        schema["components"]["securitySchemes"] = _KEYS
    if for_all:
        schema["security"] = needed
    for path in OPERATED if for_operators else ():
        for operation in schema["paths"][path].values():
            operation["security"] = needed
    app.openapi_schema = schema
    return schema


def _describe_operation(operation: Json, path: str) -> list[type[BaseModel]]:
    """Document an operation with its path's `About`; return the models of its answers."""
    about = ABOUT[path]
    operation |= {"tags": [about.tag], "summary": about.summary}
    for parameter in operation.get("parameters", ()):
        parameter.setdefault("description", "The model's name, as /v1/models lists it.")
    if about.text:
        operation["description"] = about.text
    for status, example in ERRORS.items():  # FastAPI would leave their nulls out
        if refusal := operation["responses"].get(str(status)):
            refusal["content"]["application/json"]["example"] = example.body_at(path)
    found = operation["responses"]["200"]
    if found["description"] == "Successful Response":  # FastAPI's
        found["description"] = "The answer."
    if about.answer is None:
        return [about.refusal]
    content = found["content"]
    content["application/json"] = {"schema": _ref(about.answer)}
    if about.event is None:
        return [about.refusal, about.answer]
    content["application/json"]["example"] = ANSWERS[about.answer]
    content["text/event-stream"] = {"schema": _ref(about.event), "example": ANSWERS[about.event]}
    return [about.refusal, about.answer, about.event]


def _fill_in_meanings(schemas: dict[str, Json]) -> None:
    """Give fields without a description that of `SamplingParams`, or their only value."""
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            if "description" in field:
                continue
            if "const" in field:
                field["description"] = f"Always {field['const']}."
            elif name in SamplingParams.model_fields:
                field["description"] = SamplingParams.model_fields[name].description


def _add_noop_fields(properties: dict[str, Json]) -> None:
    """List the fields of other servers whose values have no effect here."""
    for name, schema in noop_schemas().items():
        properties.setdefault(name, schema | {"description": NOTED})


def _ref(model: type[BaseModel]) -> Json:
    return {"$ref": _REF.format(model=model.__name__)}


def refusals(*statuses: int, kind: type[BaseModel] = answers.Refusal) -> dict[int | str, Json]:
    """Return a route's `responses`."""
    return {status: _refusal(status, kind) for status in statuses}


def _refusal(status: int, body: type[BaseModel]) -> Json:
    content = {"application/json": {"schema": _ref(body)}}
    made: Json = {"description": _MEANINGS[status], "content": content}
    if status in _HEADERS:
        name, text, kind = _HEADERS[status]
        made["headers"] = {name: {"description": text, "schema": {"type": kind}}}
    return made


def describe_query(path: str) -> Json:
    """Return the additions to the description of an operator's route with a query."""
    fields = QUERIES[path].model_json_schema()["properties"]
    listed = []
    for name, schema in fields.items():
        described = {"description": schema.pop("description"), "schema": schema}
        listed.append({"name": name, "in": "query", "required": False, **described})
    return {"openapi_extra": {"parameters": listed}}


def describe_body(path: str) -> Json:
    """Return the additions to the description of a route with a body."""
    body, kind = BODIES[path], ABOUT[path].refusal
    content = {"application/json": {"schema": _ref(body), "examples": REQUESTS[path]}}
    responses = refusals(400, 401, 404, 408, 413, 415, 500, 503, kind=kind)
    if issubclass(body, SharedFields):
        responses |= refusals(422, 429, 504, kind=kind)
        responses[200] = {"description": "The answer; with `stream: true` its chunks, as events."}
    if path in OPERATED:
        responses |= refusals(403, kind=kind)
    extra = {"requestBody": {"required": True, "content": content}}
    return {"openapi_extra": extra, "responses": dict(sorted(responses.items(), key=str))}
