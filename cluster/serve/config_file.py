"""YAML files that describe one or more models, each an application with its own path."""

import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from diffray.cluster.serve.app_config import AppConfig, app_config

BUILDER = "diffray.cluster.app:build"
_PATH = re.compile(r"/|(/(?!-)[A-Za-z0-9._~-]+)+")  # Serve reserves paths that start with /-


@dataclass(frozen=True, slots=True)
class Application:
    """A model as Serve runs it: with a name and a path."""

    name: str
    route_prefix: str
    config: AppConfig


def read_applications(path: Path) -> tuple[Application, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{path}: the file cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: the file is not UTF-8 text") from None
    return applications(parse_yaml(text, str(path)), str(path))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader lets the last of two equal keys win; this one refuses the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> object:
    """Return the values of a YAML text; raise ValueError with the place of an error."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}: {line}{error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date such as 2024-13-45
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from None


def applications(given: object, where: str) -> tuple[Application, ...]:
    """Return the models of one mapping, of a list, or of a list under `llm_configs`."""
    models = _models(given, where)
    found = []
    for number, model in enumerate(models, start=1):
        place = where if len(models) == 1 else f"{where}, model {number}"
        prefix, rest = _split_prefix(model, place)
        config = app_config(rest, place)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", config.model_id).strip("-") or f"model-{number}"
        default = "/" if len(models) == 1 else f"/{name}"
        found.append(Application(name, default if prefix is None else prefix, config))
    _refuse_duplicates(found, where)
    return tuple(found)


def serve_config(applications: tuple[Application, ...]) -> dict[str, Any]:
    """Return the configuration for `serve deploy`, with only the given options."""
    return {
        "applications": [
            {
                "name": each.name,
                "route_prefix": each.route_prefix,
                "import_path": BUILDER,
                "args": each.config.model_dump(mode="json", exclude_unset=True),
            }
            for each in applications
        ]
    }


def _models(given: object, where: str) -> list[object]:
    if isinstance(given, dict):
        if "applications" in given:
            raise ValueError(
                f"{where}: this is Serve's own format; run it with `serve run`, or give the "
                "options under args"
            )
        if set(given) != {"llm_configs"}:
            return [given]
        given = given["llm_configs"]
    if not isinstance(given, list) or not given:
        raise ValueError(f"{where}: expected the options of a model, or a list of them")
    return given


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


def _refuse_duplicates(found: list[Application], where: str) -> None:
    for what, names in (
        ("the model_id", [each.config.model_id for each in found]),
        ("the name", [each.name for each in found]),
        ("the route_prefix", [each.route_prefix for each in found]),
    ):
        (name, count), *_ = Counter(names).most_common(1)
        if count > 1:
            raise ValueError(f"{where}: {what} {name!r} is given twice; each model needs its own")
