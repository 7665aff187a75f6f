"""The OpenAPI description of what the endpoints read and refuse, and the page at /docs.

FastAPI's own page loads scripts from elsewhere, which the content security policy forbids.
"""

import json
from collections.abc import Mapping
from html import escape
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from diffray.cluster.api.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from diffray.cluster.api.errors import Json
from diffray.cluster.api.messages import StrictModel

BODIES: Final[dict[str, type[StrictModel]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_REF: Final = "#/components/schemas/{model}"
_POLICY: Final = {"block_length": 32, "decoder": {"kind": "threshold", "threshold": 0.9}}
_EXAMPLES: Final[dict[str, Json]] = {
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
    400: "The request is invalid; `param` names the field.",
    401: "No valid API key was sent.",
    404: "There is no such model.",
    408: "The body was not complete in time.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json.",
    422: "The request crashes the engine each time it runs.",
    429: "The queue is full; retry after Retry-After seconds.",
    503: "The engine cannot answer now; retry after Retry-After seconds.",
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


def describe(app: FastAPI) -> Json:
    """Return the app's OpenAPI schema, with its bodies' schemas as components."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        # FastAPI's refusal of a path's parameter, which is never sent.
        del schema["paths"]["/v1/models/{name}"]["get"]["responses"]["422"]
        for name in ("HTTPValidationError", "ValidationError"):
            del schema["components"]["schemas"][name]
        shown: list[Any] = [(each, "validation") for each in (*BODIES.values(), Refusal)]
        schema["components"]["schemas"] |= models_json_schema(shown, ref_template=_REF)[1]["$defs"]
        app.openapi_schema = schema
    return app.openapi_schema


def refusals(*statuses: int) -> dict[int | str, Json]:
    """Return a route's `responses`."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=Refusal.__name__)}}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def describe_body(path: str) -> Json:
    """Return the additions to the description of a route with a body."""
    body = BODIES[path]
    schema = {"$ref": _REF.format(model=body.__name__)}
    content = {"application/json": {"schema": schema, "example": _EXAMPLES[path]}}
    responses = refusals(400, 401, 404, 408, 413, 415, 503)
    if issubclass(body, GenerationBody):
        responses |= refusals(422, 429, 504)
        responses[200] = {
            "description": "The answer; with `stream: true` its chunks, as events.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    extra = {"requestBody": {"required": True, "content": content}}
    return {"openapi_extra": extra, "responses": responses}


def page(schema: Mapping[str, Any]) -> str:
    """Return the description as plain HTML: the paths with an example each, then all objects."""
    info = schema["info"]
    title, summary = escape(info["title"]), escape(info.get("summary", ""))
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f"<h1>{title} {escape(info['version'])}</h1>",
        f'<p>{summary} See also <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2>")
            for media in operation.get("requestBody", {}).get("content", {}).values():
                parts.append(f"<p>{escape(_type(media['schema']))}, such as</p>")
                parts.append(f"<pre>{escape(json.dumps(media['example'], indent=1))}</pre>")
    for name, about in schema["components"]["schemas"].items():
        parts.append(f"<h2>{escape(name)}</h2><p>{escape(about.get('description', ''))}</p><dl>")
        for field, what in about.get("properties", {}).items():
            default = f", default {what['default']!r}" if what.get("default") is not None else ""
            parts.append(f"<dt><code>{escape(field)}</code>: {escape(_type(what) + default)}</dt>")
            parts.append(f"<dd>{escape(what.get('description', ''))}</dd>")
        parts.append("</dl>")
    return "\n".join(parts) + "\n"


def _type(what: Mapping[str, Any]) -> str:
    """Return a field's type in a few words; null is left out, because it stands for the default."""
    if choices := [*what.get("anyOf", []), *what.get("oneOf", [])]:
        return " or ".join(_type(each) for each in choices if each.get("type") != "null")
    if "$ref" in what:
        return str(what["$ref"].rpartition("/")[2])
    if what.get("type") == "array":
        return f"list of {_type(what.get('items', {}))}"
    return str(what.get("const", what.get("type", "anything")))
