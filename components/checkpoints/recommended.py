"""The sampler's settings in generation_config.json, as defaults of requests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from diffray.components.checkpoints.folder import CheckpointError, read_json
from diffray.components.config import explain
from diffray.components.model_spec import ModelSpec
from diffray.components.models.advice import FIRST, family_of
from diffray.components.models.fields import shown
from diffray.components.policy import DiffusionParams


def with_recommended(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return a model's facts with those of its checkpoint: its name, the sampler's settings."""
    spec = replace(spec, family=family_of(spec.family, path))
    if first := FIRST.get(spec.family):
        others = (kind for kind in spec.iterations if kind != first)
        spec = replace(spec, own_iterations=(first, *others))
    file = path / "generation_config.json"
    if not spec.sampler or not file.is_file():
        return spec
    given = read_json(file)
    parts = {"decoder": dict(spec.decoder), "iteration": dict(spec.iteration)}
    for theirs, ours in spec.sampler.items():
        if (value := _value(file, given, theirs)) is not None:
            part, _, name = ours.partition(".")
            parts[part][name] = value
    try:
        DiffusionParams.model_validate(parts)
    except ValidationError as error:
        reason = explain(error, {ours: theirs for theirs, ours in spec.sampler.items()})
        raise CheckpointError(f"{file}: {reason}; correct it or remove it") from None
    return replace(spec, decoder=parts["decoder"], iteration=parts["iteration"])


def _value(file: Path, given: dict[str, Any], name: str) -> object:
    """Return the value under a dotted name; null counts as absent."""
    outer, _, inner = name.partition(".")
    found = given.get(outer)
    if not inner or found is None:
        return found
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: {outer!r} is {shown(found)}; expected an object")
    return found.get(inner)
