"""From what was typed to the body of a request; it is the server that judges it."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

# What a request says under `diffusion`.
DIFFUSION = (
    "block_length",
    "iteration",
    "decoder",
    "cache",
    "cfg_scale",
    "zero_confidence_token_ids",
)


def request_options(typed: Mapping[str, object], settings: Iterable[str] = ()) -> dict[str, Any]:
    """Return the options of a body; what is None or empty was not typed, nothing may be said twice.

    Names with a dot reach into a part: `decoder.threshold`. Settings are NAME=VALUE.
    """
    body: dict[str, Any] = {}
    for name, value in typed.items():
        if value is not None and value != []:
            _put(body, name, value)
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not name or not equals:
            raise ValueError(f"--set {setting!r} is no NAME=VALUE, as decoder.threshold=0.8")
        _put(body, name, _value(text))
    return body


def _put(body: dict[str, Any], name: str, value: object) -> None:
    """Store a value at a dotted name."""
    path = name.split(".")
    if path[0] in DIFFUSION:
        path.insert(0, "diffusion")
    *folders, last = path
    inner: Any = body
    for folder in folders:
        inner = inner.setdefault(folder, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{name}: {folder!r} has no options of its own")
    if last in inner:
        raise ValueError(f"{name} is given twice")
    inner[last] = value


def _value(text: str) -> object:
    """Return the JSON value, or the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text
