"""The page at /docs: the OpenAPI description as plain HTML, without scripts or external files."""

import base64
import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from html import escape
from typing import Any, Final

_STYLE: Final = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td{border-top:1px solid #ccc;padding:.2rem .6rem;"
    "vertical-align:top}code,pre{font-size:14px}h2{margin-top:2.5rem}"
)
_HASH: Final = base64.b64encode(sha256(_STYLE.encode()).digest()).decode()
HEADERS: Final = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
}


def page(schema: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI schema."""
    info, schemas = schema["info"], schema.get("components", {}).get("schemas", {})
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>',
        f"<style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info.get('summary', ''))} The same for machines: "
        '<a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts += _body(operation, schemas)
    return "\n".join(parts) + "\n"


def _body(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    """Yield an example of a request body, and tables of its fields."""
    content = operation.get("requestBody", {}).get("content", {})
    for kind, media in content.items():
        yield f"<p>Takes <code>{escape(kind)}</code>, as</p>"
        yield f"<pre>{escape(json.dumps(media['example'], indent=1))}</pre>"
        yield from _fields("", schemas[_name(media["schema"])], schemas)


def _fields(place: str, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of an object's fields, then those of nested objects."""
    required = schema.get("required", [])
    inner = []
    yield "<table>"
    for field, what in schema.get("properties", {}).items():
        told = ["required"] if field in required else []
        told += [f"default {what['default']!r}"] if _worth_telling(what) else []
        told += [what["description"]] if "description" in what else []
        yield (
            f"<tr><td><code>{escape(field)}</code><td>{escape(_type(what))}"
            f"<td>{escape('; '.join(told))}"
        )
        inner += [(f"{place}{field}", name) for name in _parts(what)]
    yield "</table>"
    for field, name in inner:
        about = schemas[name].get("description", "").partition("\n")[0]
        yield f"<h3><code>{escape(field)}</code>: {escape(name)}</h3><p>{escape(about)}</p>"
        yield from _fields(f"{field}.", schemas[name], schemas)


def _name(what: Mapping[str, Any]) -> str:
    return str(what["$ref"].rpartition("/")[2])


def _parts(what: Mapping[str, Any]) -> list[str]:
    """Return the names of the objects that a field may contain."""
    if "$ref" in what:
        return [_name(what)]
    return [name for each in _choices(what) for name in _parts(each)]


def _choices(what: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*what.get("anyOf", []), *what.get("oneOf", [])]


def _worth_telling(what: Mapping[str, Any]) -> bool:
    return what.get("default") is not None and not isinstance(what["default"], list | dict)


def _type(what: Mapping[str, Any]) -> str:
    """Return a field's type in a few words, without null, which means the default."""
    if choices := _choices(what):
        kinds = [_type(each) for each in choices if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in what:
        return _name(what)
    if what.get("type") == "array":
        return f"list of {_type(what.get('items', {}))}"
    if "const" in what:
        return repr(what["const"])
    return str(what.get("type", "anything"))
