"""JSON schemas as regular expressions; what a regular expression cannot hold is refused by name."""

import json
from collections.abc import Iterator
from typing import Any, Final

from diffray.components.config import InvalidField

# Honoured, by the type they belong to ...
_HONOURED: Final = {
    "": {"type", "enum", "const", "anyOf", "oneOf", "$ref"},
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
}
# ... and what only describes.
_ANNOTATIONS: Final = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
    "examples", "readOnly", "title", "writeOnly",
}  # fmt: skip
_DEEPEST = 3  # levels of objects in one that has no schema


def regex_of_schema(schema: Any) -> str:
    """Return the expression of the JSON texts that a schema allows, properties in its order."""
    from outlines_core.json_schema import build_regex_from_schema

    for path, keyword in _unknown_keywords(schema, "json"):
        raise InvalidField(
            f"{path}: structured outputs cannot honour the keyword {keyword!r}; leave it out",
            path,
        )
    try:
        return str(build_regex_from_schema(json.dumps(schema), None, _DEEPEST))
    except (ValueError, TypeError) as error:
        raise InvalidField(f"json: {error}", "json") from None


def _unknown_keywords(schema: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(schema, dict):
        return
    known = set().union(*_HONOURED.values()) | _ANNOTATIONS
    for keyword, value in schema.items():
        if keyword not in known:
            yield path, keyword
        elif keyword in ("properties", "$defs", "definitions") and isinstance(value, dict):
            for name, inner in value.items():
                yield from _unknown_keywords(inner, f"{path}.{keyword}.{name}")
        elif keyword in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            for number, inner in enumerate(value):
                yield from _unknown_keywords(inner, f"{path}.{keyword}.{number}")
        elif keyword in ("items", "additionalProperties"):
            yield from _unknown_keywords(value, f"{path}.{keyword}")
