"""JSON strings as regular expressions: any, of a length, of a format, or of a pattern."""

import re
from collections.abc import Mapping
from typing import Any, Final

from diffray.components.grammar.anchors import without_anchors

_PLAIN: Final = r'[^"\\\x00-\x1f]'
_UNSAFE: Final = r'"\\\x00-\x1f'  # characters that JSON strings must escape
STRING: Final = rf'"(?:{_PLAIN}|\\["\\/bfnrt])*"'

_DATE: Final = (
    "[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    "|(?:0[13578]|1[02])-31)"
)
_CLOCK: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_OFFSET: Final = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# In counted repetitions each character has only one continuation: otherwise outlines-core's time
# doubles with each count. At most 62 and 251 characters, of 63 and 253 allowed.
_LABEL: Final = "[a-z0-9]{1,20}(?:-[a-z0-9]{1,20}){0,2}"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL}){{1,3}}"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "time": f"{_CLOCK}{_OFFSET}",
    "date-time": f"{_DATE}T{_CLOCK}{_OFFSET}",
    "duration": "P(?:[0-9]+D(?:T[0-9]+H)?|T[0-9]+[HMS]|[0-9]+[WMY])",
    "email": rf"[A-Za-z0-9]{{1,20}}(?:[._+-][A-Za-z0-9]{{1,20}}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uri": rf"https?://{_HOST}(?:/[A-Za-z0-9._~-]*)*",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}


def text(times: str) -> str:
    """Return the strings with a number of characters that the quantifier `times` allows.

    None is written with a backslash: if a choice is repeated, outlines-core's time doubles with
    each repetition.
    """
    return f'"{_PLAIN}{times}"'


def pattern_in_string(pattern: str) -> str:
    """Return the strings that match a pattern as a whole, written as in JSON.

    JSON writes some characters with a backslash: those that a pattern names are escaped, and those
    that `.` or a negated set would allow are excluded.
    """
    from re import _parser  # how Python itself reads patterns

    without_anchors(pattern)  # refuses those that `_node` could not leave out
    return _written(_parser.parse(pattern))


def _written(nodes: Any) -> str:
    return "".join(_node(str(kind), value) for kind, value in nodes)


def _node(kind: str, value: Any) -> str:
    match kind:
        case "LITERAL":
            return _literal(value)
        case "NOT_LITERAL":
            return f"[^{in_set(value)}{_UNSAFE}]"
        case "ANY":
            return f"[^{_UNSAFE}]"
        case "IN":
            return _set(value)
        case "BRANCH":
            return f"(?:{'|'.join(map(_written, value[1]))})"
        case "SUBPATTERN":
            return f"(?:{_written(value[3])})"
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, inner = value
            upto = "" if str(most) == "MAXREPEAT" else most
            return f"(?:{_written(inner)}){{{least},{upto}}}"
        case "AT" if str(value) in ("AT_BEGINNING", "AT_END"):
            return ""  # it matches as a whole anyway
    raise ValueError(f"{kind.lower().replace('_', ' ')} is not supported")


def _set(items: Any) -> str:
    kinds = [(str(kind), value) for kind, value in items]
    negated = kinds[0][0] == "NEGATE"
    inner = "".join(_item(kind, value, negated=negated) for kind, value in kinds[negated:])
    return f"[^{inner}{_UNSAFE}]" if negated else f"[{inner}]"


def _item(kind: str, value: Any, *, negated: bool) -> str:
    if kind == "RANGE":
        low, high = value
        if not negated and (low < 32 or any(low <= ord(c) <= high for c in '"\\')):
            raise ValueError(f"the range {chr(low)!r} to {chr(high)!r} holds characters to escape")
        return f"{in_set(low)}-{in_set(high)}"
    if kind == "LITERAL":
        if not negated and (value < 32 or chr(value) in '"\\'):
            raise ValueError(f"{chr(value)!r} within brackets is not supported")
        return in_set(value)
    if kind == "CATEGORY":
        classes = {"CATEGORY_DIGIT": "0-9", "CATEGORY_WORD": "A-Za-z0-9_", "CATEGORY_SPACE": " "}
        if str(value) in classes:
            return classes[str(value)]
        if not negated and str(value) == "CATEGORY_NOT_SPACE":
            return "!#-\\[\\]-~"
    raise ValueError(f"{str(value).lower().replace('_', ' ')} is not supported")


def _literal(code: int) -> str:
    """Return a character as JSON writes it, escaped for an expression."""
    import json

    return re.escape(json.dumps(chr(code), ensure_ascii=False)[1:-1])


def in_set(code: int) -> str:
    return f"\\x{code:02x}" if code < 128 else chr(code)
