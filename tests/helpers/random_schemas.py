"""Random JSON schemas of the keywords that structured outputs honour, and what follows them."""

import random
import re
from collections.abc import Callable
from datetime import datetime, time
from typing import Any
from urllib.parse import urlsplit

import jsonschema

from diffray.components.grammar.json_strings import FORMATS

_PLAIN = ("string", "integer", "number", "boolean", "null")
_LEAVES = (*_PLAIN, "enum", "const", "pattern", "format", "length", "range", "types")
_INNER = (
    *("array", "items", "prefix", "object", "others", "map", "reference"),
    *("anyOf", "oneOf", "tagged", "allOf"),
)
KINDS = (*_LEAVES, *_INNER)
_PATTERNS = (
    "[a-c]{2,3}", "^x[0-9]+$", "ab|cd", r"^\d{3}-\d{2}$", ".x.{0,2}", "[^a]b?", 'q"+', r"\w+-\S"
)  # fmt: skip
_VALUES = ("a", "b c", 3, None, True, 1.5, 'q"t')
_NAMES = ("name", "age", "x", "a b", "tags", "\u00e9")


def random_schema(draw: random.Random, depth: int = 2, kind: str = "") -> dict[str, Any]:
    """Return a schema of one kind, or of any; a reference in it leads to `#/$defs/T`."""
    kind = kind or draw.choice(KINDS if depth else _LEAVES)
    few = draw.randint(0, 2)
    if kind in _INNER:
        return _nested(draw, depth - 1, kind, few)
    match kind:
        case "enum":
            return {"enum": draw.sample(_VALUES, draw.randint(1, 3))}
        case "const":
            return {"const": draw.choice(("v", 7, False, {"a": 1}))}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(_PATTERNS)}
        case "format":
            return {"type": "string", "format": draw.choice([*FORMATS])}
        case "length":
            return {"type": "string", "minLength": few, "maxLength": few + draw.randint(0, 4)}
        case "range":
            return _range(draw)
        case "types":
            return _types(draw)
    return {"type": kind}


def _nested(draw: random.Random, depth: int, kind: str, few: int) -> dict[str, Any]:
    """Return a schema that has others of so many levels within it."""

    def inner() -> dict[str, Any]:
        return random_schema(draw, depth)

    match kind:
        case "array":
            return {"type": "array", "items": inner()}
        case "items":
            most = few + draw.randint(0, 2)
            return {"type": "array", "items": inner(), "minItems": few, "maxItems": most}
        case "prefix":
            found = {"type": "array", "prefixItems": [random_schema(draw, 0) for _ in range(2)]}
            return found | draw.choice(({}, {"items": False}, {"items": {"type": "integer"}}))
        case "map":
            return {"type": "object", "additionalProperties": inner()}
        case "anyOf":
            return {"anyOf": [inner() for _ in range(2)]}
        case "oneOf":  # of types that differ
            return {"oneOf": [{"type": "null"}, _range(draw), _object(draw, inner)]}
        case "tagged":  # objects that differ in a constant
            return {"oneOf": [_tagged(inner, tag) for tag in ("p", "q")]}
        case "allOf":
            return {"allOf": [inner()]}
        case "others":
            found = _object(draw, inner) | {"additionalProperties": inner()}
            return found | {"required": [*found["required"], "other"]}
    if kind == "object":
        return _object(draw, inner)
    return {"$ref": "#/$defs/T"}


def _object(draw: random.Random, inner: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randint(1, 3))
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: inner() for name in names},
        "required": [name for name in names if draw.random() < 0.6],
    }
    return found | ({"additionalProperties": False} if draw.random() < 0.5 else {})


def _tagged(inner: Callable[[], dict[str, Any]], tag: str) -> dict[str, Any]:
    properties = {"kind": {"const": tag}, "x": inner()}
    return {"type": "object", "properties": properties, "required": ["kind"]}


def _types(draw: random.Random) -> dict[str, Any]:
    types = draw.sample(("string", "integer", "number", "boolean", "null", "array"), 2)
    bounds = {"minLength": 1, "maxLength": 3, "minimum": -3, "maximum": 12, "maxItems": 2}
    return {"type": types} | {key: bounds[key] for key in draw.sample([*bounds], 3)}


def _range(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-120, 120)
    lower, upper = (
        draw.choice((f"{name}imum", f"exclusive{name.capitalize()}imum")) for name in ("min", "max")
    )
    if draw.random() < 0.3:
        return {"type": "integer", draw.choice((lower, upper)): low}
    high = low + 1 + draw.choice((1, 3, 17, 200, 12345))
    return {"type": draw.choice(("integer", "number")), lower: low, upper: high}


def checked(schema: dict[str, Any], value: Any) -> None:
    """Raise ValidationError if a value is not what the schema says, formats included."""
    jsonschema.Draft202012Validator(schema, format_checker=_FORMATS).validate(value)


_FORMATS = jsonschema.FormatChecker()
_TIME = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DATE = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"


@_FORMATS.checks("time", ValueError)
def _is_time(text: object) -> bool:
    return time.fromisoformat(str(text)).tzinfo is not None


@_FORMATS.checks("date-time", ValueError)
def _is_date_time(text: object) -> bool:
    return str(text)[10] == "T" and datetime.fromisoformat(str(text)).tzinfo is not None


@_FORMATS.checks("duration")
def _is_duration(text: object) -> bool:
    """Whether RFC 3339's appendix A has it."""
    return bool(re.fullmatch(rf"P(?:\d+W|{_DATE}(?:{_TIME})?|{_TIME})", str(text), re.ASCII))


@_FORMATS.checks("hostname")
def _is_hostname(text: object) -> bool:
    label = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    return len(str(text)) < 254 and bool(re.fullmatch(rf"{label}(?:\.{label})*", str(text)))


@_FORMATS.checks("email")
def _is_email(text: object) -> bool:
    own, at, host = str(text).rpartition("@")
    atoms = bool(re.fullmatch(r"[\w!#$%&'*+/=?^`{|}~-]+(?:\.[\w+-]+)*", own, re.ASCII))
    return bool(at) and 0 < len(own) < 65 and atoms and _is_hostname(host)


@_FORMATS.checks("uri", ValueError)
def _is_uri(text: object) -> bool:
    parts = urlsplit(str(text))
    return parts.scheme in ("http", "https") and _is_hostname(parts.hostname)
