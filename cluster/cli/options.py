"""From what was typed to the parameters of a request."""

from collections.abc import Iterable, Mapping
from typing import Any

from diffray.cluster.cli.request_options import request_options
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams

PARTS = ("iteration", "decoder", "cache")


def sampling_params(typed: Mapping[str, object], settings: Iterable[str]) -> SamplingParams:
    """Return the parameters; what is None or empty was not typed, and nothing may be said twice.

    Names with a dot reach into a part: `decoder.threshold`.
    """
    given = request_options(typed, settings)
    diffusion = given.get("diffusion", {})
    for part in PARTS:
        _add_kind(diffusion, part)
    params = SamplingParams(**given)
    if params.n != 1:
        raise ValueError(f"n is {params.n}, but the command line prints one answer; leave n out")
    return params


def _add_kind(diffusion: dict[str, Any], part: str) -> None:
    """Say a part's kind where only its numbers were given; only the decoder's default is fixed."""
    numbers = diffusion.get(part)
    if not isinstance(numbers, dict) or "kind" in numbers:
        return
    if part != "decoder":
        first = next(iter(numbers))
        raise ValueError(f"--set {part}.{first} needs --{part} KIND: the default is the model's")
    numbers["kind"] = DiffusionParams().decoder.kind
