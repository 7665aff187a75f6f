"""The OpenAPI description of bodies that the endpoints read by themselves."""

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
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
_REF: Final = "#/components/schemas/{model}"


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the app's OpenAPI schema, with its bodies' schemas as components."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        _, bodies = models_json_schema(
            [(body, "validation") for body in BODIES.values()], ref_template=_REF
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema


def request_body(path: str) -> dict[str, Any]:
    """Return what a route adds to its description."""
    ref = {"$ref": _REF.format(model=BODIES[path].__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": ref}}}}
