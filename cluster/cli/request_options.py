"""Turns flags into a request's body, or into sampling parameters for an engine in this process."""

import json
from collections.abc import Iterable
from typing import Any, Final

from diffray.cluster.cli.model_flags import Given
from diffray.components.config import UNIONS
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams

DIFFUSION: Final = tuple(DiffusionParams.model_fields)  # the fields of `diffusion` in a request


def request_options(given: Given, settings: Iterable[str] | None) -> dict[str, Any]:
    """Return typed flags and settings as a body of a request; no field may be set twice."""
    body: dict[str, Any] = {}
    for name, value in given.items():
        if value is not None:
            _put(body, name, value)
    for setting in settings or ():
        put_setting(body, setting)
    return body


def put_setting(body: dict[str, Any], setting: str) -> None:
    """Store a setting such as `decoder.threshold=0.8` in a body."""
    name, equals, text = setting.partition("=")
    if not name or not equals:
        raise ValueError(f"expected NAME=VALUE, such as decoder.threshold=0.8 (given: {setting!r})")
    _put(body, name, _value(text))


def sampling_params(given: Given, settings: Iterable[str] | None) -> SamplingParams:
    """Return the same options as the sampling parameters of one answer."""
    options = request_options(given, settings)
    for part in UNIONS:
        _add_kind(options.get("diffusion", {}), part)
    params = SamplingParams(**options)
    if params.n != 1:
        raise ValueError(f"n is {params.n}, but the command line prints one answer; leave n out")
    return params


def _add_kind(diffusion: dict[str, Any], part: str) -> None:
    """Add the kind to a decoder given by settings alone: `threshold`; other parts must name it."""
    settings = diffusion.get(part)
    if not isinstance(settings, dict) or "kind" in settings:
        return
    if part != "decoder":
        first = next(iter(settings))
        raise ValueError(f"--set {part}.{first} needs --{part} KIND: the default is the model's")
    settings["kind"] = "threshold"


def _put(body: dict[str, Any], name: str, value: object) -> None:
    """Store a value at a dotted name, such as `decoder.threshold`; a part's string is its kind."""
    path = name.split(".")
    if name in UNIONS and isinstance(value, str):
        path.append("kind")
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
    """Return the JSON value, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
