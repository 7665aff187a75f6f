"""A JSON schema as literals and fields: the text that all its answers share, and the open parts.

Objects have all properties of their schema, in its order and without spaces.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from diffray.components.grammar.json_schema import (
    Writer,
    no_endless_schema,
    unless_too_deep,
)

_FEW: Final = 1000  # integers of a range that are looked at one by one


@dataclass(frozen=True, slots=True)
class Field:
    """An open part of the answer: what it may be, as an expression.

    `texts` has all its possible texts if they are few; `choice` says that the schema lists them.
    """

    path: str  # such as `address.city`; empty for the whole answer
    regex: str
    texts: tuple[str, ...] = ()
    choice: bool = False


Part = str | Field


def parts_of_schema(schema: Any) -> list[Part]:
    """Return literals and fields in turn; raises InvalidField for what cannot be honoured."""
    with no_endless_schema():
        writer = Writer(schema)
        writer.any_of("json", schema, {})  # refuses by name what it does not know
        return joined(_parts(writer, "", schema, {}))


def choice_of(texts: tuple[str, ...], path: str = "") -> Field:
    """Return the field that is one of these texts."""
    return Field(path, "|".join(map(re.escape, texts)), texts, choice=True)


def joined(parts: list[Part]) -> list[Part]:
    """Return the parts with adjacent literals joined."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return found


def _parts(writer: Writer, path: str, schema: Any, seen: Mapping[str, int]) -> list[Part]:
    if not isinstance(schema, dict):
        return [Field(path, writer.any_of(path, schema, seen))]
    if "$ref" in schema:
        return _parts(writer, path, *writer.resolved(path, schema["$ref"], seen))
    if "const" in schema or "enum" in schema:
        return _options(path, schema.get("enum", [schema.get("const")]))
    if len(schema.get("allOf", ())) == 1:
        return _parts(writer, path, schema["allOf"][0], seen)
    if not {"anyOf", "oneOf"} & schema.keys():
        match schema.get("type", "object" if "properties" in schema else None):
            case "boolean":
                return _options(path, [True, False])
            case "null":
                return ["null"]
            case "object" if schema.get("properties"):
                return _object(writer, path, schema, seen)
            case "string":
                quoted = Field(path, writer.any_of(path, schema, seen))
                return ['"', replace(quoted, regex=quoted.regex[1:-1]), '"']
            case "integer":
                return [Field(path, writer.any_of(path, schema, seen), _integers(schema))]
    return [Field(path, writer.any_of(path, schema, seen))]


def _object(writer: Writer, path: str, schema: Any, seen: Mapping[str, int]) -> list[Part]:
    properties, others = schema["properties"], schema.get("additionalProperties", True)
    required = schema.get("required", [])
    names = [*properties, *(name for name in required if name not in properties)]
    found: list[Part] = []
    for name in names:
        inner = f"{path}.{name}" if path else name
        write = partial(_parts, writer, inner, properties.get(name, others), seen)
        for parts in [write()] if name in required else unless_too_deep(write):
            found += ["," if found else "{", f"{json.dumps(name, ensure_ascii=False)}:", *parts]
    return [*(found or ["{"]), "}"]


def _options(path: str, values: list[Any]) -> list[Part]:
    texts = tuple(dict.fromkeys(json.dumps(each, ensure_ascii=False) for each in values))
    if len(texts) == 1:
        return [texts[0]]
    if all(isinstance(each, str) for each in values):
        return ['"', choice_of(tuple(text[1:-1] for text in texts), path), '"']
    return [choice_of(texts, path)]


def _integers(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the integers that a schema allows, if they are few."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    least = [math.ceil(low)] if low is not None else []
    least += [math.floor(above) + 1] if above is not None else []
    most = [math.floor(high)] if high is not None else []
    most += [math.ceil(below) - 1] if below is not None else []
    if not least or not most or min(most) - max(least) > _FEW:
        return ()
    return tuple(map(str, range(max(least), min(most) + 1)))
