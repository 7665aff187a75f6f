"""Turns flags into a request's body, or into sampling parameters for an engine in this process."""

import json
from typing import TYPE_CHECKING, Any

from diffray.cluster.cli.flag_records import typed
from diffray.cluster.cli.flags import Diffusion, Sampling
from diffray.components.config import UNIONS

if TYPE_CHECKING:
    from diffray.components.params import SamplingParams

# The fields of `diffusion` in a request.
DIFFUSION = (
    *(
        "block_length",
        *UNIONS,
        "canvas",
        "canvas_length",
        "slot_length",
        "cfg_scale",
        "speculation",
    ),
    "zero_confidence_token_ids",
)


def request_options(sampling: Sampling, diffusion: Diffusion, **others: Any) -> dict[str, Any]:
    """Return the options that were typed, as fields of a body; no field may be set twice."""
    given = others | typed(sampling) | typed(diffusion)
    settings = given.pop("settings", ())
    body: dict[str, Any] = {}
    for name, value in given.items():
        if value is not None:
            _put(body, name, value)
    for setting in settings:
        put_setting(body, setting)
    return body


def put_setting(body: dict[str, Any], setting: str) -> None:
    """Store a setting such as `decoder.threshold=0.8` in a body."""
    name, equals, text = setting.partition("=")
    if not name or not equals:
        raise ValueError(f"expected NAME=VALUE, such as decoder.threshold=0.8 (given: {setting!r})")
    _put(body, name, _value(text))


def sampling_params(sampling: Sampling, diffusion: Diffusion, **others: Any) -> "SamplingParams":
    """Return the same options as the sampling parameters of one answer."""
    from diffray.components.params import SamplingParams

    given = request_options(sampling, diffusion, **others)
    for part in UNIONS:
        _add_kind(given.get("diffusion", {}), part)
    params = SamplingParams(**given)
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
