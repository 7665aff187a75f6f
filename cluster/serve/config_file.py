"""YAML files that describe one or more models, each an application with its own path.

Several models also have an ingress: an application that passes requests on by `model`.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffray.cluster.control.yaml_file import read_yaml
from diffray.cluster.serve.app_config import AppConfig, IngressConfig, app_config, ingress_config
from diffray.cluster.serve.deployment import most_requests

BUILDER = "diffray.cluster.app:build"
INGRESS_BUILDER = "diffray.cluster.app:ingress"
_ENDPOINT = ("api", "api_key_env", "operator_key_env")  # options that an ingress has, too
_LONGEST_NAME = 100  # of an ingress's application, which is part of a log's file name
_PATH = re.compile(r"/|(/(?!-)[A-Za-z0-9._~-]+)+")  # Serve reserves paths that start with /-


@dataclass(frozen=True, slots=True)
class Application:
    """A model as Serve runs it: with a name and a path."""

    name: str
    route_prefix: str
    config: AppConfig

    @property
    def title(self) -> str:
        return self.config.model_id

    @property
    def grace_s(self) -> float:
        return self.config.deployment_config.graceful_shutdown_timeout_s


@dataclass(frozen=True, slots=True)
class IngressApplication:
    """The ingress of several models, as Serve runs it."""

    name: str
    route_prefix: str
    config: IngressConfig

    @property
    def title(self) -> str:
        return "the ingress"

    @property
    def grace_s(self) -> float:
        return self.config.graceful_shutdown_timeout_s


@dataclass(frozen=True, slots=True)
class Applications:
    """What one command serves: a model, or several and their ingress."""

    models: tuple[Application, ...]
    ingress: IngressApplication | None = None

    @property
    def all(self) -> tuple[Application | IngressApplication, ...]:
        return self.models if self.ingress is None else (*self.models, self.ingress)

    @property
    def prefix_routed(self) -> list[str]:
        """The names of the applications with prefix_routing."""
        return [each.name for each in self.models if each.config.deployment_config.prefix_routing]


def read_applications(path: Path) -> Applications:
    return applications(read_yaml(path), str(path))


def applications(given: object, where: str, flags: Mapping[str, str] | None = None) -> Applications:
    """Return the models of a mapping, of a list, or of a list under `llm_configs`.

    `flags` are what the user typed to set options, by their paths.
    """
    models, ingress = _models(given, where)
    found = []
    for number, model in enumerate(models, start=1):
        place = where if len(models) == 1 else f"{where}, model {number}"
        prefix, rest = _split_prefix(model, place)
        config = app_config(rest, place, flags)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", config.model_id).strip("-") or f"model-{number}"
        default = "/" if len(models) == 1 else f"/{name}"
        found.append(Application(name, default if prefix is None else prefix, config))
    if len(models) > 1:
        made = Applications(tuple(found), _ingress(found, ingress, where))
    elif ingress is None:
        made = Applications(tuple(found))
    else:
        raise ValueError(
            f"{where}: an ingress is for several models, and this is one; leave it out"
        )
    _refuse_duplicates(made, where)
    return made


def serve_config(applications: Applications) -> dict[str, Any]:
    """Return the configuration for `serve deploy`, with only the given options."""
    written = []
    for each in applications.all:
        builder = INGRESS_BUILDER if each is applications.ingress else BUILDER
        args = each.config.model_dump(mode="json", exclude_unset=True)
        written.append(
            {
                "name": each.name,
                "route_prefix": each.route_prefix,
                "import_path": builder,
                "args": args,
            }
        )
    return {"applications": written}


def _ingress(models: list[Application], given: object, where: str) -> IngressApplication:
    """Return the ingress of some models; options that are not given follow from theirs."""
    place = f"{where}, ingress"
    prefix, rest = _split_prefix({} if given is None else given, place)
    if isinstance(rest, dict):
        if "models" in rest:
            raise ValueError(
                f"{place}: the ingress is for all models of the file; leave models out"
            )
        rest = _ingress_defaults([each.config for each in models], place, rest) | rest
        rest["models"] = {each.config.model_id: each.name for each in models}
    config = ingress_config(rest, place)
    if any(map(_has_keys, (each.config for each in models))) and not _has_keys(config):
        raise ValueError(
            f"{place}: the models need API keys, so the ingress must, too; give it api_key_env"
        )
    # Named after its models, so that the ingress of other models does not replace it.
    name = "-".join(("ingress", *(each.name for each in models)))[:_LONGEST_NAME]
    return IngressApplication(name, "/" if prefix is None else prefix, config)


def _has_keys(config: AppConfig | IngressConfig) -> bool:
    return bool(config.api.api_keys) or config.api_key_env is not None


def _ingress_defaults(
    configs: list[AppConfig], where: str, given: dict[Any, Any]
) -> dict[str, Any]:
    """Return the options of an ingress that follow from its models."""
    deployments = [each.deployment_config for each in configs]
    found: dict[str, Any] = {
        "num_replicas": 2 if max(each.most_replicas for each in deployments) > 1 else 1,
        "max_ongoing_requests": sum(
            most_requests(each) * each.deployment_config.most_replicas for each in configs
        ),
        "graceful_shutdown_timeout_s": max(
            each.graceful_shutdown_timeout_s for each in deployments
        ),
    }
    if not given.keys() & {*_ENDPOINT}:
        first = configs[0]
        if any(
            getattr(each, name) != getattr(first, name) for each in configs for name in _ENDPOINT
        ):
            raise ValueError(
                f"{where}: the models differ in {_ENDPOINT[0]} or in {' or '.join(_ENDPOINT[1:])}; "
                "give the ingress its own"
            )
        for name in {*_ENDPOINT} & first.model_fields_set:
            found[name] = getattr(first, name)
    return found


def _models(given: object, where: str) -> tuple[list[object], object]:
    """Return the options of the models, and of their ingress if there are any."""
    ingress = None
    listed = given
    if isinstance(given, dict):
        if "applications" in given:
            raise ValueError(
                f"{where}: this is Serve's own format; run it with `serve run`, or give the "
                "options under args"
            )
        if "llm_configs" not in given:
            one = {name: value for name, value in given.items() if name != "ingress"}
            return [one], given.get("ingress")
        for name in given:
            if name not in ("llm_configs", "ingress"):
                raise ValueError(
                    f"{where}: unknown option {name!r} beside llm_configs, where only ingress may "
                    "stand; a model's options belong to its entry"
                )
        listed, ingress = given["llm_configs"], given.get("ingress")
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{where}: expected the options of a model, or a list of them")
    return listed, ingress


def _split_prefix(model: object, where: str) -> tuple[str | None, object]:
    """Separate the path, which only Serve needs, from the model's options."""
    if not isinstance(model, dict) or "route_prefix" not in model:
        return None, model
    prefix = model["route_prefix"]
    if not isinstance(prefix, str) or not _PATH.fullmatch(prefix):
        raise ValueError(
            f"{where}: route_prefix: expected a path such as '/llada', "
            f"without a slash at its end (given: {prefix!r})"
        )
    return prefix, {key: value for key, value in model.items() if key != "route_prefix"}


def _refuse_duplicates(found: Applications, where: str) -> None:
    for what, names in (
        ("the model_id", [each.config.model_id for each in found.models]),
        ("the name", [each.name for each in found.all]),
        ("the route_prefix", [each.route_prefix for each in found.all]),
    ):
        (name, count), *_ = Counter(names).most_common(1)
        if count > 1:
            ingress = found.ingress
            own = (
                " (the ingress has it too)"
                if ingress and name in (ingress.name, ingress.route_prefix)
                else ""
            )
            raise ValueError(f"{where}: {what} {name!r}{own} is given twice; each needs its own")
