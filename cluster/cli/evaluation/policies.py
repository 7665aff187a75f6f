"""The policies that an evaluation compares, read from a YAML file.

    llada: {decoder: {kind: fixed, steps: 64}, cache: none}
    fast: {decoder: {kind: threshold, threshold: [0.7, 0.9]}, cache: [none, dual]}
    int8: {engine: {quantization: int8}}

A policy has the names of a request: parts of `diffusion`, and sampling parameters; `engine` has
options of an engine. A list is alternatives: `fast` is four policies. A list as a value is the
only one of a list.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

from diffray.cluster.cli.flags import DIFFUSION
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.yaml_file import read_yaml
from diffray.components.config import InvalidField
from diffray.components.params import SamplingParams

OF_TASKS: Final = ("n", "seed", "max_tokens", "stop", "logprobs", "top_logprobs")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """What one policy adds to the body of each request, and the options of its engine."""

    name: str
    request: Json = field(default_factory=dict)
    engine: Json = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The name of its files' folder."""
        return re.sub(r"[^\w.=+-]+", "_", self.name)

    @staticmethod
    def parse(name: str, given: Mapping[str, Any]) -> "NamedPolicy":
        """Check a policy without alternatives."""
        options = dict(given)
        engine = options.pop("engine", {})
        diffusion = {each: options.pop(each) for each in DIFFUSION if each in options}
        for each in OF_TASKS:
            if each in options:
                raise ValueError(f"policy {name!r}: {each} is the task's; leave it out")
        try:
            SamplingParams(**options, diffusion=diffusion)
            EngineConfig(**engine)
        except (InvalidField, TypeError) as error:
            raise ValueError(f"policy {name!r}: {error}") from None
        return NamedPolicy(name, options | ({"diffusion": diffusion} if diffusion else {}), engine)


DEFAULT: Final = NamedPolicy("default")  # what the model's authors recommend


def read_policies(path: Path) -> list[NamedPolicy]:
    """Return all policies of a file, with distinct names."""
    given = read_yaml(path)
    if not isinstance(given, dict) or not given:
        raise ValueError(f"{path}: expected names, each with a policy: fast: {{cache: dual}}")
    found = []
    for name, options in given.items():
        if not isinstance(options, dict | None):
            raise ValueError(f"{path}: {name} must be a mapping, such as {{cache: dual}}")
        for label, chosen in alternatives(options or {}):
            found.append(NamedPolicy.parse(f"{name}{label}", chosen))
    folders: dict[str, str] = {}
    for each in found:
        if (other := folders.setdefault(each.folder, each.name)) != each.name:
            raise ValueError(f"{path}: {each.name!r} and {other!r} share a folder; rename one")
    return found


def alternatives(given: Json) -> Iterator[tuple[str, Json]]:
    """Yield every choice of the lists' members, with a label that tells it from the others."""
    spread = []
    for key, value in given.items():
        members = value if isinstance(value, list) else [value]
        if not members:
            raise ValueError(f"{key}: an empty list has no alternatives; leave it out")
        choices = []
        for member in members:
            inner = alternatives(member) if isinstance(member, dict) else [("", member)]
            for label, chosen in inner:
                name = f" {key}={_shown(member)}" if len(members) > 1 else ""
                choices.append((name + label, (key, chosen)))
        spread.append(choices)
    for chosen in product(*spread):
        yield "".join(label for label, _ in chosen), dict(pair for _, pair in chosen)


def _shown(member: Any) -> str:
    if isinstance(member, dict):
        return str(member.get("kind", next(iter(member.values()), "")))
    return str(member)
