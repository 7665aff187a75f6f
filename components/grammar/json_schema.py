"""JSON schemas as regular expressions.

An expression accepts only valid texts, but not all of them: objects have the named properties, in
their order, and a recursive schema ends after a few levels. A keyword that cannot be honoured is
refused by name.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator

from diffray.components.config import InvalidField
from diffray.components.grammar.json_numbers import NUMBER, integers, numbers
from diffray.components.grammar.json_strings import FORMATS, STRING, pattern_in_string, text

Schema = Mapping[str, Any]
T = TypeVar("T")

# The keywords that matter for each type; "" is for all of them.
_HONOURED: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
}
_ANNOTATIONS: Final = frozenset(
    "$anchor $comment $defs $id $schema default definitions deprecated description examples "
    "nullable readOnly strict title writeOnly".split()
)
_ALL: Final = frozenset[str]().union(*_HONOURED.values()) | _ANNOTATIONS
_DEEPEST: Final = 3  # levels of a recursive schema
_MOST_LEVELS: Final = 100  # of lists and objects in a schema; reading it is recursive
_ANY: Final = 1  # levels of arrays and objects in a value without a schema
_TYPES: Final = "object", "array", "string", "number", "integer", "boolean", "null"


class TooDeep(Exception):
    """A recursive schema has reached its last level."""


def not_too_deep(schema: T) -> T:
    """Return the schema; raises ValueError if it has too many levels."""
    level: list[Any] = [schema]
    for _ in range(_MOST_LEVELS + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return schema
        parts = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for part in parts for inner in part]
    raise ValueError(f"a schema has at most {_MOST_LEVELS} nested lists and objects")


_NOT_TOO_DEEP: Final = AfterValidator(not_too_deep)
SchemaObject = Annotated[dict[str, Any], _NOT_TOO_DEEP]
AnySchema = Annotated[dict[str, Any] | str | None, _NOT_TOO_DEEP]  # as an object or as text


def regex_of_schema(schema: Any) -> str:
    """Return an expression of valid JSON texts; raises InvalidField if that is impossible."""
    with no_endless_schema():
        return Writer(schema).any_of("json", schema, {})


@contextmanager
def no_endless_schema() -> Iterator[None]:
    """Refuse a schema that requires itself beyond the allowed levels."""
    try:
        yield
    except (TooDeep, RecursionError):
        raise InvalidField(
            f"json: the schema needs itself on more than {_DEEPEST} levels", "json"
        ) from None


class Writer:
    """Writes the expressions of one schema; `seen` counts the references on the way to a part."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def any_of(self, path: str, schema: Any, seen: Mapping[str, int]) -> str:
        """Return the expression of the values that a schema allows."""
        if schema is True or schema == {}:
            return self._value(_ANY)
        if not isinstance(schema, dict):
            raise _refused(path, f"{schema!r:.50} is not a schema that a text can follow")
        for keyword in schema:
            if keyword not in _ALL:
                raise _refused(path, f"cannot honour the keyword {keyword!r}; leave it out")
        if "$ref" in schema:
            return self._reference(path, schema["$ref"], seen)
        if "const" in schema:
            return _literals([schema["const"]])
        if "enum" in schema:
            return _literals(_list(path, "enum", schema["enum"]))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return self._choice(path, keyword, schema, seen)
        types = schema.get("type", _type_of(schema))
        types = types if isinstance(types, list) else [types]
        if types == [None]:
            raise _refused(path, "has no type; add one")
        return _either([self._typed(path, kind, schema, seen) for kind in types])

    def _typed(self, path: str, kind: Any, schema: Schema, seen: Mapping[str, int]) -> str:
        if kind not in _TYPES:
            raise _refused(path, f"the type {kind!r:.50} is not one of {', '.join(_TYPES)}")
        if kind == "object":
            return self._object(path, schema, seen)
        if kind == "array":
            return self._array(path, schema, seen)
        if kind == "string":
            return _string(path, schema)
        if kind in ("number", "integer"):
            return (integers if kind == "integer" else numbers)(path, schema)
        return "(?:true|false)" if kind == "boolean" else "null"

    def _reference(self, path: str, name: Any, seen: Mapping[str, int]) -> str:
        return self.any_of(name, *self.resolved(path, name, seen))

    def resolved(
        self, path: str, name: Any, seen: Mapping[str, int]
    ) -> tuple[Any, Mapping[str, int]]:
        """Return what a reference leads to, and the references on the way to it."""
        if not isinstance(name, str) or not name.startswith("#"):
            raise _refused(path, f"the reference {name!r:.50} is not within the schema")
        if seen.get(name, 0) >= _DEEPEST:
            raise TooDeep
        found = self._root
        for step in filter(None, name[1:].split("/")):
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or step not in found:
                raise _refused(path, f"the reference {name!r:.50} leads nowhere")
            found = found[step]
        return found, {**seen, name: seen.get(name, 0) + 1}

    def _choice(self, path: str, keyword: str, schema: Schema, seen: Mapping[str, int]) -> str:
        branches = _list(path, keyword, schema[keyword])
        beside = {k: v for k, v in schema.items() if k in _ALL - _ANNOTATIONS and k != keyword}
        if beside.keys() - {"type"}:
            raise _refused(path, f"cannot honour {keyword!r} beside {min(beside)!r}")
        if keyword == "allOf" and len(branches) > 1:
            raise _refused(path, "cannot honour 'allOf' of more than one schema; join them")
        if keyword == "oneOf" and not _disjoint(branches):
            raise _refused(path, "the branches of 'oneOf' may overlap; use 'anyOf'")
        found = [
            part
            for number, branch in enumerate(branches)
            for part in unless_too_deep(
                partial(self.any_of, f"{path}.{keyword}.{number}", branch, seen)
            )
        ]
        if not found:
            raise TooDeep
        return _either(found)

    def _array(self, path: str, schema: Schema, seen: Mapping[str, int]) -> str:
        least, most = _bounds(path, schema, "minItems", "maxItems")
        first = [
            self.any_of(f"{path}.prefixItems.{number}", item, seen)
            for number, item in enumerate(_list(path, "prefixItems", schema.get("prefixItems", [])))
        ]
        if schema.get("items") is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and most < max(least, 1):
            if most < least:
                raise _refused(path, "'minItems' is more items than are allowed")
            return r"\[\]"
        first = first[:most]
        more = None if most is None else most - len(first)
        rest = [] if more == 0 else unless_too_deep(lambda: self._items(path, schema, seen))
        needed = max(least - len(first), 0)
        if not rest and needed:
            raise TooDeep
        if not first:
            if not rest:
                return r"\[\]"
            times = _times(max(needed - 1, 0), None if more is None else more - 1)
            inner = f"{rest[0]}(?:, ?{rest[0]}){times}"
            return rf"\[(?:{inner})\]" if needed else rf"\[(?:{inner})?\]"
        tail = f"(?:, ?{rest[0]}){_times(needed, more)}" if rest else ""
        for number in range(len(first) - 1, 0, -1):
            tail = f"(?:, ?{first[number]}{tail})" + ("" if number < least else "?")
        inner = f"{first[0]}{tail}"
        return rf"\[{inner}\]" if least else rf"\[(?:{inner})?\]"

    def _items(self, path: str, schema: Schema, seen: Mapping[str, int]) -> str:
        return self.any_of(f"{path}.items", schema.get("items", True), seen)

    def _object(self, path: str, schema: Schema, seen: Mapping[str, int]) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _refused(path, "'properties' is not an object, or 'required' not a list")
        others = schema.get("additionalProperties", True)
        missing = [name for name in required if name not in properties]
        if missing and others is False:
            raise _refused(path, f"requires {missing[0]!r}, which it does not allow")
        if not properties and not missing:
            return self._map(path, others, seen)
        members: list[tuple[str, bool]] = []
        for name in (*properties, *missing):
            write = partial(
                self.any_of, f"{path}.properties.{name}", properties.get(name, others), seen
            )
            value = [write()] if name in required else unless_too_deep(write)
            members += [(f"{_literals([name])}: ?{part}", name in required) for part in value]
        return r"\{" + _members(members) + r"\}"

    def _map(self, path: str, others: Any, seen: Mapping[str, int]) -> str:
        if others is False:
            return r"\{\}"
        inner = unless_too_deep(lambda: self.any_of(f"{path}.additionalProperties", others, seen))
        return _map_of(inner[0]) if inner else r"\{\}"

    def _value(self, depth: int) -> str:
        """Return the expression of any value, nested up to `depth`."""
        plain = [STRING, NUMBER, "true", "false", "null"]
        if depth == 0:
            return _either(plain)
        inner = self._value(depth - 1)
        return _either([*plain, _map_of(inner), rf"\[(?:{inner}(?:, ?{inner})*)?\]"])


def _map_of(value: str) -> str:
    member = f"{STRING}: ?{value}"
    return rf"\{{(?:{member}(?:, ?{member})*)?\}}"


def _members(members: Items[tuple[str, bool]]) -> str:
    """Return the members in their order, with commas between those that are present."""
    first = next((at for at, (_, required) in enumerate(members) if required), None)
    if first is None:  # any of them may be the first
        starts = (
            member + "".join(f"(?:, ?{other})?" for other, _ in members[at + 1 :])
            for at, (member, _) in enumerate(members)
        )
        return f"(?:{_either(list(starts))})?"
    before = "".join(f"(?:{member}, ?)?" for member, _ in members[:first])
    after = "".join(
        f", ?{member}" if required else f"(?:, ?{member})?"
        for member, required in members[first + 1 :]
    )
    return before + members[first][0] + after


def _string(path: str, schema: Schema) -> str:
    least, most = _bounds(path, schema, "minLength", "maxLength")
    if "pattern" in schema or "format" in schema:
        if {"minLength", "maxLength"} & schema.keys() or {"pattern", "format"} <= schema.keys():
            raise _refused(path, "cannot honour 'pattern' or 'format' beside another of a string")
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise _refused(
                    path, f"the format {schema['format']!r:.50} is not one of {', '.join(FORMATS)}"
                )
            return f'"(?:{FORMATS[schema["format"]]})"'
        try:
            return f'"(?:{pattern_in_string(schema["pattern"])})"'
        except (ValueError, TypeError, re.error) as error:
            raise _refused(path, f"cannot honour the pattern: {error}") from None
    return STRING if (least, most) == (0, None) else text(_times(least, most))


def _literals(values: Items[Any]) -> str:
    return _either([re.escape(json.dumps(each, ensure_ascii=False)) for each in values])


def _either(parts: Items[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(dict.fromkeys(parts))})"


def _times(least: int, most: int | None) -> str:
    return "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"


def unless_too_deep(write: Callable[[], T]) -> list[T]:
    """Return what `write` returns, or nothing if it is too deep for an optional part."""
    try:
        return [write()]
    except TooDeep:
        return []


def _bounds(path: str, schema: Schema, low: str, high: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for name, value in ((low, least), (high, most)):
        if value is not None and (type(value) is not int or not 0 <= value <= 10_000):
            raise _refused(path, f"{name!r} is {value!r:.50}; expected 0 to 10000")
    if most is not None and most < least:
        raise _refused(path, f"{low!r} is more than {high!r}")
    return least, most


def _list(path: str, keyword: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or (not value and keyword != "prefixItems"):
        raise _refused(path, f"{keyword!r} is not a list, or an empty one")
    return value


def _type_of(schema: Schema) -> str | None:
    """Return the one type to which a schema's keywords belong, if it names none."""
    kinds = [kind for kind, own in _HONOURED.items() if kind and own & schema.keys()]
    return kinds[0] if len(kinds) == 1 else None


def _disjoint(branches: Items[Any]) -> bool:
    """Whether no value can be of two branches: they differ in type, or in a constant."""
    known = [set(_marks(branch)) for branch in branches]
    if all(known) and len(set().union(*known)) == sum(map(len, known)):
        return True
    tags = [
        {
            name: set(_marks(inner))
            for name, inner in branch.get("properties", {}).items()
            if name in branch.get("required", ()) and ("const" in inner or "enum" in inner)
        }
        for branch in branches
        if isinstance(branch, dict)
    ]
    shared = set(tags[0]).intersection(*tags) if len(tags) == len(branches) else set()
    return any(
        len(set().union(*(tag[name] for tag in tags))) == sum(len(tag[name]) for tag in tags)
        for name in shared
    )


def _marks(schema: Any) -> Iterator[str]:
    """Yield what distinguishes a schema's values: their types, or the values themselves."""
    if not isinstance(schema, dict):
        return
    if "const" in schema or "enum" in schema:
        yield from (json.dumps(each) for each in schema.get("enum", [schema.get("const")]))
    elif isinstance(schema.get("type"), str):
        yield "number" if schema["type"] == "integer" else schema["type"]


def _refused(path: str, reason: str) -> InvalidField:
    return InvalidField(f"structured outputs: {path}: {reason}", path)
