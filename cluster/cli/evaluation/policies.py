"""The policies that an evaluation compares, read from a YAML file.

    llada: {decoder: {kind: fixed, steps: 64}, cache: none}
    fast: {decoder: {kind: threshold, threshold: [0.7, 0.9]}, cache: [none, dual]}
    int8: {engine: {quantization: int8}}

A policy has the names of a request: parts of `diffusion`, and sampling parameters; `engine` has
options of an engine. A list is alternatives, so `fast` is four policies, unless a field's value is
a list.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final, get_origin

from diffray.cluster.cli.flags import DIFFUSION
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.yaml_file import read_yaml
from diffray.components.config import InvalidField
from diffray.components.params import SamplingParams
from diffray.components.policy import IN_DIFFUSION, DiffusionParams
from diffray.components.spelling import did_you_mean

OF_TASKS: Final = ("n", "seed", "max_tokens", "stop", "logprobs", "top_logprobs")
# What a policy may have.
NAMES: Final = (
    *DIFFUSION,
    *(name for name in SamplingParams.model_fields if name not in (*OF_TASKS, "diffusion")),
    *("engine", "diffusion"),
)
# Fields whose value is a list.
LISTS: Final = {
    name
    for model in (SamplingParams, DiffusionParams)
    for name, field in model.model_fields.items()
    if get_origin(field.annotation) is tuple
}
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
        engine = options.pop("engine", None) or {}
        diffusion = dict(options.pop("diffusion", None) or {})
        diffusion |= {each: options.pop(each) for each in DIFFUSION if each in options}
        for each in options:
            if each in OF_TASKS:
                raise ValueError(f"policy {name!r}: {each} is the task's; leave it out")
            if each not in NAMES and each not in IN_DIFFUSION:
                near = did_you_mean(str(each), NAMES) or ";"
                raise ValueError(
                    f"policy {name!r}: unknown option {each!r}{near} Allowed: {', '.join(NAMES)}"
                )
        try:
            SamplingParams(**options, diffusion=diffusion)
            EngineConfig(**engine)
        except InvalidField as error:
            raise ValueError(f"policy {name!r}: {error}") from None
        except TypeError:
            raise ValueError(
                f"policy {name!r}: names must be texts, and engine a mapping"
            ) from None
        return NamedPolicy(name, options | ({"diffusion": diffusion} if diffusion else {}), engine)


DEFAULT: Final = NamedPolicy("default")  # what the model's authors recommend


def read_policies(path: Path) -> list[NamedPolicy]:
    """Return all policies of a file, with distinct names."""
    given = read_yaml(path)
    if not isinstance(given, dict) or not given:
        raise ValueError(f"{path}: expected names, each with a policy: fast: {{cache: dual}}")
    if given.keys() <= {*NAMES}:  # one policy, as `diffray tune` writes it
        given = {path.stem: given}
    found = []
    for name, options in given.items():
        if not isinstance(options, dict | None) or not isinstance(name, str):
            raise ValueError(f"{path}: expected {name!r}: {{cache: dual}}, a name and a policy")
        try:
            for label, chosen in alternatives(options or {}):
                found.append(NamedPolicy.parse(f"{name}{label}", chosen))
        except RecursionError:
            raise ValueError(f"{path}: {name} contains itself") from None
    folders: dict[str, str] = {}
    for each in found:
        if not each.folder.strip("._"):
            raise ValueError(f"{path}: {each.name!r} is no name for a folder; rename it")
        if other := folders.get(each.folder):
            raise ValueError(f"{path}: {each.name!r} and {other!r} share a folder; rename one")
        folders[each.folder] = each.name
    return found


def alternatives(given: Json) -> Iterator[tuple[str, Json]]:
    """Yield every choice of the lists' members, with a label that tells it from the others."""
    spread = []
    for key, value in given.items():
        members = value if isinstance(value, list) and key not in LISTS else [value]
        if not members:
            raise ValueError(f"{key}: an empty list has no alternatives; leave it out")
        choices = []
        for member in members:
            inner = alternatives(member) if isinstance(member, dict) else [("", member)]
            for label, chosen in inner:
                name = f" {key}={_shown(member, members)}" if len(members) > 1 else ""
                choices.append((name + label, (key, chosen)))
        spread.append(choices)
    for chosen in product(*spread):
        yield "".join(label for label, _ in chosen), dict(pair for _, pair in chosen)


def _shown(member: Any, members: list[Any]) -> str:
    """Return what tells a member from the others: its kind, if all have different ones."""
    if not isinstance(member, dict):
        return str(member)
    kinds = [each.get("kind") for each in members if isinstance(each, dict)]
    if kinds.count(member.get("kind")) == 1:
        return str(member["kind"])
    return ",".join(str(each) for each in member.values() if not isinstance(each, list | dict))
