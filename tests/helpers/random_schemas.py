"""Random JSON schemas of the keywords that structured outputs honour."""

import random
from typing import Any

_PLAIN = ("string", "integer", "number", "boolean", "null")
_LEAVES = (*_PLAIN, "enum", "const", "pattern", "format", "length", "range", "range")
_INNER = ("array", "items", "prefix", "anyOf", "object", "object", "reference")
_PATTERNS = (
    "[a-c]{2,3}", "^x[0-9]+$", "ab|cd", r"^\d{3}-\d{2}$", ".x.{0,2}", "[^a]b?", 'q"+', r"\w+-\S"
)  # fmt: skip
_FORMATS = ("date", "date-time", "uuid", "email", "ipv4", "uri")
_VALUES = ("a", "b c", 3, None, True, 1.5, 'q"t')
_NAMES = ("name", "age", "x", "a b", "tags", "\u00e9")


def random_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema; a reference in it leads to `#/$defs/T`."""
    kind = draw.choice((*_LEAVES, *_INNER) if depth else _LEAVES)
    few = draw.randint(0, 2)
    match kind:
        case "enum":
            return {"enum": draw.sample(_VALUES, draw.randint(1, 3))}
        case "const":
            return {"const": draw.choice(("v", 7, False, {"a": 1}))}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(_PATTERNS)}
        case "format":
            return {"type": "string", "format": draw.choice(_FORMATS)}
        case "length":
            return {"type": "string", "minLength": few, "maxLength": few + draw.randint(0, 4)}
        case "range":
            return _range(draw)
        case "array":
            return {"type": "array", "items": random_schema(draw, depth - 1)}
        case "items":
            most = few + draw.randint(0, 2)
            items = random_schema(draw, depth - 1)
            return {"type": "array", "items": items, "minItems": few, "maxItems": most}
        case "prefix":
            return {"type": "array", "prefixItems": [random_schema(draw, 0) for _ in range(2)]}
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth - 1) for _ in range(2)]}
        case "reference":
            return {"$ref": "#/$defs/T"}
        case "object":
            names = draw.sample(_NAMES, draw.randint(1, 3))
            found: dict[str, Any] = {
                "type": "object",
                "properties": {name: random_schema(draw, depth - 1) for name in names},
                "required": [name for name in names if draw.random() < 0.6],
            }
            return found | ({"additionalProperties": False} if draw.random() < 0.5 else {})
    return {"type": kind}


def _range(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-120, 120)
    lower, upper = (
        draw.choice((f"{name}imum", f"exclusive{name.capitalize()}imum")) for name in ("min", "max")
    )
    if draw.random() < 0.3:
        return {"type": "integer", draw.choice((lower, upper)): low}
    high = low + 1 + draw.choice((1, 3, 17, 200, 12345))
    return {"type": draw.choice(("integer", "number")), lower: low, upper: high}
