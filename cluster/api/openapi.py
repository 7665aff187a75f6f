"""The OpenAPI document: FastAPI's, with the bodies and queries that handlers read themselves.

Under `--ignore-unknown-fields` what it does not know is left out of a body, and its answer says so.
"""

import re
from base64 import b64encode
from hashlib import sha256
from inspect import getdoc
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from diffray.cluster.api.anthropic_body import MessagesBody
from diffray.cluster.api.bodies import (
    ChatBody,
    CompletionBody,
    SharedFields,
)
from diffray.cluster.api.errors import Json
from diffray.cluster.api.fields import NOTED, StrictModel
from diffray.cluster.api.noop_fields import is_recognized, noop_schemas
from diffray.cluster.api.operations import OPERATED, OPERATIONS
from diffray.cluster.api.responses_body import ResponsesBody
from diffray.cluster.api.served import EXAMPLE_CHAT, EXAMPLE_PROMPT, QUESTIONS
from diffray.components.params import SamplingParams
from diffray.components.spelling import did_you_mean

_LISTED: Final = QUESTIONS | OPERATIONS
ANSWERS: Final[dict[str, type[SharedFields]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
}
BODIES: Final[dict[str, type[StrictModel]]] = {
    **ANSWERS,
    **{path: each.given for path, each in _LISTED.items() if not each.queried},
}
_ASKED: Final = EXAMPLE_CHAT | {"max_tokens": 96}
EXAMPLES: Final[dict[str, Json]] = {
    "/v1/chat/completions": _ASKED | {"diffusion": {"decoder": {"kind": "threshold"}}},
    "/v1/completions": {"prompt": "def add(a, b):", "max_tokens": 32},
    "/v1/responses": {"input": EXAMPLE_PROMPT, "max_output_tokens": 96},
    "/v1/messages": _ASKED,
    **{path: each.example for path, each in QUESTIONS.items() if each.example is not None},
}
ERROR: Final[dict[int | str, Json]] = {
    "default": {"description": "An error with OpenAI's fields, or Anthropic's at its paths."}
}
_GUIDE: Final = (
    "The fields are those of OpenAI and vLLM. Those of diffusion models alone are under "
    "`diffusion`. A field that is unknown or out of range is refused with a 400 that names it; "
    "null means its default. With the server's option `--ignore-unknown-fields` unknown fields "
    "are ignored, and the answer's `warnings` name them. `/v1/models` says what each model is and "
    "lists prompts to try."
)
_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_REF: Final = "#/components/schemas/{model}"


def describe(
    app: FastAPI, *, has_keys: tuple[bool, bool], model: str | None = None, about: str = ""
) -> Json:
    """Return the app's OpenAPI document.

    `has_keys` says whether there are API keys and operators' keys. Examples of requests name
    `model`, if given; `about` comes before the guide.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description="\n\n".join(filter(None, (about, _GUIDE))),
        routes=app.routes,
    )
    bodies = BODIES.values()
    made = models_json_schema([(each, "validation") for each in bodies], ref_template=_REF)
    schemas: dict[str, Json] = made[1]["$defs"]
    document["components"] = {"schemas": schemas}
    _describe_fields(schemas)
    for_all, for_operators = has_keys
    needed: list[Json] = [{name: []} for name in _KEYS]
    if any(has_keys):
        document["components"]["securitySchemes"] = _KEYS
    if for_all:
        document["security"] = needed
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own, which is never sent
            if for_operators and path in OPERATED:
                operation["security"] = needed
            if model is not None and path in EXAMPLES:
                content = operation["requestBody"]["content"]["application/json"]
                content["example"] = {"model": model, **content["example"]}
    app.openapi_schema = document
    return document


def _describe_fields(schemas: dict[str, Json]) -> None:
    """Give fields without a description that of `SamplingParams`; list those without effect."""
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            if name in SamplingParams.model_fields:
                field.setdefault("description", SamplingParams.model_fields[name].description)
    for body in BODIES.values():
        if issubclass(body, SharedFields):
            for name, schema in noop_schemas().items():
                fields = schemas[body.__name__]["properties"]
                fields.setdefault(name, schema | {"description": NOTED})


def documented(path: str, kind: type[StrictModel], *, queried: bool = False) -> dict[str, Any]:
    """Return the options of a route whose body, or query, describes it."""
    parts = path.removeprefix("/v1/").strip("/").split("/")
    title = " ".join(parts).replace("_", " ").capitalize()
    about = {"name": "_".join(parts), "summary": title, "description": getdoc(kind)}
    if queried:
        fields = kind.model_json_schema()["properties"]
        listed = [
            {"name": name, "in": "query", "schema": schema} for name, schema in fields.items()
        ]
        return about | {"openapi_extra": {"parameters": listed}}
    content: Json = {"schema": {"$ref": _REF.format(model=kind.__name__)}}
    if path in EXAMPLES:
        content["example"] = EXAMPLES[path]
    body = {"required": True, "content": {"application/json": content}}
    return about | {"openapi_extra": {"requestBody": body}}


def docs_page(title: str) -> Response:
    """Return FastAPI's page, Swagger UI; a browser may load only what it is made of."""
    page = get_swagger_ui_html(openapi_url="openapi.json", title=title)
    (script,) = re.findall(rb"<script>(.*?)</script>", page.body, re.DOTALL)
    digest = b64encode(sha256(script).digest()).decode()
    page.headers["Content-Security-Policy"] = (
        "default-src 'none'; connect-src 'self'; img-src data: https://fastapi.tiangolo.com; "
        f"script-src https://cdn.jsdelivr.net 'sha256-{digest}'; "
        "style-src https://cdn.jsdelivr.net 'unsafe-inline'; frame-ancestors 'none'"
    )
    return page


_MOST_NAMED: Final = 10  # as the header with the warnings has to stay short
# A field of one API means something to its clients at the paths of the others too.
_FIELDS: Final = frozenset(
    name for path, kind in BODIES.items() if path not in OPERATED for name in kind.model_fields
)


def without_unknown(given: object, kind: type[StrictModel]) -> tuple[object, list[str]]:
    """Return a body without unknown fields, and a warning for each of them."""
    if not isinstance(given, dict):
        return given, []
    ignored = [name for name in given if name not in _FIELDS and not is_recognized(name)]
    gone = {*ignored}
    warnings = [  # ASCII, for the header
        f"the unknown field {name[:64]!a} is ignored{did_you_mean(name, kind.model_fields)}"
        for name in ignored[:_MOST_NAMED]
    ]
    if len(ignored) > _MOST_NAMED:
        warnings.append(f"other unknown fields that are ignored: {len(ignored) - _MOST_NAMED}")
    return {name: given[name] for name in given if name not in gone}, warnings


def with_warnings(answer: Json, warnings: list[str]) -> Json:
    if not warnings:
        return answer
    return answer | {"warnings": [*warnings, *answer.get("warnings", [])]}
