"""The OpenAPI description of bodies and errors that the endpoints handle themselves."""

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from diffray.cluster.api.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

BODIES: Final[dict[str, type[Body]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
GENERATING: Final = (422, 429, 504)  # besides the errors of every body
_REF: Final = "#/components/schemas/{model}"
_POLICY: Final = {"block_length": 32, "decoder": {"kind": "threshold", "threshold": 0.9}}
_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "What is 12 plus 30?"}],
        "max_tokens": 64,
        "diffusion": _POLICY,
    },
    "/v1/completions": {
        "prompt": "The sum of 12 and 30 is",
        "max_tokens": 32,
        "diffusion": _POLICY | {"cache": {"kind": "none"}},
    },
    "/tokenize": {"prompt": "What is 12 plus 30?"},
    "/detokenize": {"tokens": [3, 14, 15]},
}
_MEANINGS: Final = {
    400: "Something in the request cannot be honoured; `param` names it.",
    401: "No known API key was shown.",
    404: "There is no such model.",
    408: "The body was not complete in time.",
    413: "The body is too large.",
    415: "The body does not say that it is JSON.",
    422: "The request ends the engine each time that it runs.",
    429: "The queue is full; come back after Retry-After seconds.",
    503: "The engine cannot answer now; come back after Retry-After seconds.",
    504: "The answer was not complete in time.",
}


class Mistake(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """The body of every error."""

    error: Mistake


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the app's OpenAPI schema, with its bodies' schemas as components."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        shown: tuple[type[BaseModel], ...] = (*BODIES.values(), Refusal)
        _, bodies = models_json_schema([(each, "validation") for each in shown], ref_template=_REF)
        for operations in schema["paths"].values():
            for operation in operations.values():
                # The framework's own error with its own shape, which is never sent.
                if "HTTPValidationError" in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
        for name in ("HTTPValidationError", "ValidationError"):
            del schema["components"]["schemas"][name]
        schema.setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses`."""
    schema = {"$ref": _REF.format(model=Refusal.__name__)}
    return {
        status: {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": schema}},
        }
        for status in statuses
    }


def describe_body(path: str, *statuses: int) -> dict[str, Any]:
    """Return the additions to the description of a route with a body."""
    ref = {"$ref": _REF.format(model=BODIES[path].__name__)}
    content = {"application/json": {"schema": ref, "example": _EXAMPLES[path]}}
    responses = refusals(*sorted({400, 401, 404, 408, 413, 415, 503, *statuses}))
    if 429 in statuses:
        events = {"schema": {"type": "string"}}
        responses[200] = {
            "description": "The answer; with `stream: true` its chunks, as events.",
            "content": {"text/event-stream": events},
        }
    body = {"requestBody": {"required": True, "content": content}}
    return {"openapi_extra": body, "responses": responses}
