"""From what was typed to the parameters of a request."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams

PARTS = ("iteration", "decoder", "cache")


def sampling_params(typed: Mapping[str, object], settings: Iterable[str]) -> SamplingParams:
    """Return the parameters; what is None or empty was not typed, and nothing may be said twice.

    Names with a dot reach into a part: `decoder.threshold`.
    """
    given: dict[str, Any] = {}
    for name, value in typed.items():
        if value is not None and value != []:
            _put(given, name, value)
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not name or not equals:
            raise ValueError(f"--set {setting!r} is no NAME=VALUE, as decoder.threshold=0.8")
        _put(given, name, _value(text))
    diffusion = given.get("diffusion", {})
    for part in PARTS:
        _add_kind(diffusion, part)
    params = SamplingParams(**given)
    if params.n != 1:
        raise ValueError(f"n is {params.n}, but the command line prints one answer; leave n out")
    return params


def _put(given: dict[str, Any], name: str, value: object) -> None:
    """Store a value at a dotted name."""
    path = name.split(".")
    if path[0] in DiffusionParams.model_fields:
        path.insert(0, "diffusion")
    *folders, last = path
    inner = given
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


def _add_kind(diffusion: dict[str, Any], part: str) -> None:
    """Say a part's kind where only its numbers were given; only the decoder's default is fixed."""
    numbers = diffusion.get(part)
    if not isinstance(numbers, dict) or "kind" in numbers:
        return
    if part != "decoder":
        first = next(iter(numbers))
        raise ValueError(f"--set {part}.{first} needs --{part} KIND: the default is the model's")
    numbers["kind"] = DiffusionParams().decoder.kind
