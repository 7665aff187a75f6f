"""The page at /docs: the OpenAPI document as plain HTML.

FastAPI's own page loads scripts from elsewhere, which the content security policy forbids.
"""

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from hashlib import sha256
from html import escape
from typing import Any, Final

from diffray.cluster.api.chat_messages import NOTED
from diffray.cluster.api.errors import Json

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 62rem; margin: auto; padding: 0 1rem 4rem; }
h2 { margin-top: 3rem; border-bottom: 1px solid; }
h3 { margin-top: 2rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
pre { padding: 0.75rem; overflow-x: auto; border: 1px solid; border-radius: 0.25rem; }
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; }
summary { cursor: pointer; }
h2, h3, li { overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  tr, td { display: block; }
  tr { padding: 0.5rem 0; border-bottom: 1px solid; }
  tr:has(th) { display: none; }
}
"""
_HASH: Final = b64encode(sha256(_STYLE.encode()).digest()).decode()
HEADERS: Final = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
_UNIONS: Final = "DiffusionParams"  # the object that is shown together with its parts


def docs_page(document: Mapping[str, Any]) -> str:
    """Return the whole page: paths, the parts of `diffusion`, and all other objects."""
    info, schemas = document["info"], document["components"]["schemas"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}: API</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1><p>{escape(info['summary'])}</p>",
        *(f"<p>{_text(each)}</p>" for each in info["description"].split("\n\n")),
        '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>',
        *_contents(document),
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _operation(f"{method.upper()} {path}", operation, schemas)
    parts += _diffusion(schemas)
    for name in sorted(name for name in schemas if f'id="{name}"' not in "".join(parts)):
        parts += _object(name, schemas[name])
    return "\n".join(parts) + "\n</html>\n"


def _contents(document: Mapping[str, Any]) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            label = f"{method.upper()} {path}"
            link = f'<a href="#{_anchor(label)}"><code>{escape(label)}</code></a>'
            groups.setdefault(operation["tags"][0], []).append(
                f"<li>{link} {escape(operation['summary'])}</li>"
            )
    yield "<nav>"
    for group, items in groups.items():
        yield f"<h3>{escape(group)}</h3><ul>{''.join(items)}</ul>"
    yield f'<p><a href="#{_UNIONS}">All of <code>diffusion</code></a></p></nav>'


def _operation(label: str, operation: Json, schemas: Mapping[str, Json]) -> Iterator[str]:
    yield f'<h2 id="{_anchor(label)}"><code>{escape(label)}</code></h2>'
    yield f"<p>{escape(operation['summary'])}. {_text(operation.get('description', ''))}</p>"
    for media in operation.get("requestBody", {}).get("content", {}).values():
        name = media["schema"]["$ref"].rpartition("/")[2]
        yield f'<h3 id="{name}">Body: {name}</h3>'
        for number, example in enumerate(media["examples"].values()):
            opened = " open" if number == 0 else ""
            yield f"<details{opened}><summary>{escape(example['summary'])}</summary>"
            yield f"<pre>{escape(_json(example['value']))}</pre></details>"
        yield from _fields(schemas[name])
    yield "<h3>Answers</h3><table><tr><th>Status</th><th>When</th><th>Content</th></tr>"
    examples: dict[str, list[str]] = {}
    for status, answer in sorted(operation["responses"].items()):
        content = []
        for kind, media in answer.get("content", {}).items():
            content.append(f"<code>{escape(kind)}</code>: {_type(media.get('schema', {}))}")
            if "example" in media:
                group = "Example: " + kind if status == "200" else "Examples of refusals"
                shown = media["example"]
                text = shown if isinstance(shown, str) else f"{status}\n{_json(shown)}"
                examples.setdefault(group, []).append(text)
        for name, header in answer.get("headers", {}).items():
            content.append(f"header <code>{escape(name)}</code>: {escape(header['description'])}")
        text = _text(answer["description"])
        yield f"<tr><td>{escape(status)}</td><td>{text}</td><td>{'<br>'.join(content)}</td></tr>"
    yield "</table>"
    for group, texts in examples.items():
        shown = "".join(f"<pre>{escape(text)}</pre>" for text in texts)
        yield f"<details><summary>{escape(group)}</summary>{shown}</details>"


def _diffusion(schemas: Mapping[str, Json]) -> Iterator[str]:
    """Yield `diffusion`, with every kind of its parts."""
    about = schemas[_UNIONS]
    yield f'<h2 id="{_UNIONS}"><code>diffusion</code></h2><p>{_text(about["description"])}</p>'
    yield from _fields(about)
    for field, name in _parts(schemas):
        part = schemas[name]
        kind = part["properties"]["kind"]["const"]
        written = f'"{field}": {{"kind": "{kind}"}}'
        yield f'<h3 id="{name}"><code>{escape(written)}</code></h3>'
        yield f"<p>{_text(part.get('description', ''))}</p>"
        yield from _fields(part)


def _parts(schemas: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """Yield the parts of `diffusion` that have several kinds, with the object of each kind."""
    for field, about in schemas[_UNIONS]["properties"].items():
        for option in about.get("anyOf", [about]):
            for each in option.get("oneOf", []):
                yield field, each["$ref"].rpartition("/")[2]


def _object(name: str, about: Json) -> Iterator[str]:
    yield f'<h2 id="{escape(name)}">{escape(name)}</h2>'
    yield f"<p>{_text(about.get('description', ''))}</p>"
    if "oneOf" in about:
        yield f"<p>{_type(about)}</p>"
    yield from _fields(about)


def _fields(about: Json) -> Iterator[str]:
    """Yield a table of an object's fields: required ones first, those without effect last.

    `kind` is left out, because a part's heading shows it.
    """
    required = about.get("required", ())
    fields = [(n, each) for n, each in about.get("properties", {}).items() if n != "kind"]
    if not fields:
        return
    fields.sort(key=lambda each: (each[0] not in required, each[1].get("description") == NOTED))
    yield "<table><tr><th>Field</th><th>Type</th><th>Default</th><th>Meaning</th></tr>"
    for name, what in fields:
        default = ""
        if name in required:
            default = "required"
        elif what.get("default") not in (None, [], ""):
            default = _default(what["default"])
        meaning = _text(what.get("description", ""))
        yield (
            f"<tr><td><code>{escape(name)}</code></td><td>{_type(what)}</td>"
            f"<td>{default}</td><td>{meaning}</td></tr>"
        )
    yield "</table>"


def _default(value: object) -> str:
    """Return a default; empty for an object, which has its own section."""
    return "" if isinstance(value, dict) else f"<code>{escape(json.dumps(value))}</code>"


def _type(what: Mapping[str, Any]) -> str:
    """Return a field's type in a few words; null is left out, because it stands for the default."""
    if choices := [*what.get("anyOf", []), *what.get("oneOf", [])]:
        return " or ".join(_type(each) for each in choices if each.get("type") != "null")
    if "$ref" in what:
        name = escape(str(what["$ref"].rpartition("/")[2]))
        return f'<a href="#{name}">{name}</a>'
    if "enum" in what:
        return ", ".join(f"<code>{escape(json.dumps(each))}</code>" for each in what["enum"])
    if what.get("type") == "array":
        return f"list of {_type(what.get('items', {}))}"
    return escape(str(what.get("const", what.get("type", "anything")))) + _bounds(what)


def _bounds(what: Mapping[str, Any]) -> str:
    """Return a number's limits, except those of its type."""
    signs = {
        "minimum": "&ge;",
        "exclusiveMinimum": "&gt;",
        "maximum": "&le;",
        "exclusiveMaximum": "&lt;",
    }
    values = [
        f" {sign} {what[name]:g}"
        for name, sign in signs.items()
        if name in what and abs(what[name]) < 2**31 - 1
    ]
    return ",".join(values)


def _text(markdown: str) -> str:
    """Return a description as HTML; code is its only markup."""
    pieces = escape(markdown).split("`")
    return "".join(
        f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces)
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _anchor(label: str) -> str:
    return escape("".join(sign if sign.isalnum() else "-" for sign in label))
