"""YAML files with one or several models, each an application with its own path."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffray.cluster.serve.app_config import AppConfig, app_config
from diffray.cluster.serve.strict_yaml import MOST_CHARACTERS, parse_yaml

BUILDER = "diffray.cluster.app:build"


@dataclass(frozen=True, slots=True)
class Application:
    """A model as Serve runs it: with a name and a path."""

    name: str
    route_prefix: str
    config: AppConfig


def read_applications(path: Path) -> tuple[Application, ...]:
    """Read a file for `diffray serve --config`."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{path}: the file cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: the file is no text") from None
    return applications(parse_yaml(text, str(path)), str(path))


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
    _refuse_twins(found, where)
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
                f"{where}: this is Serve's own format; run it with `serve run`, or give "
                "what stands under args"
            )
        if set(given) != {"llm_configs"}:
            return [given]
        given = given["llm_configs"]
    if not isinstance(given, list) or not given:
        raise ValueError(f"{where}: a model's options or a list of them are needed")
    return given


def _split_prefix(model: object, where: str) -> tuple[str | None, object]:
    """Separate the path, which only Serve needs, from the model's options."""
    if not isinstance(model, dict) or "route_prefix" not in model:
        return None, model
    prefix = model["route_prefix"]
    if not isinstance(prefix, str) or not _is_path(prefix):
        raise ValueError(
            f"{where}: route_prefix: {prefix!r} is no path; give one as '/llada', "
            "without a slash at its end"
        )
    return prefix, {key: value for key, value in model.items() if key != "route_prefix"}


def _is_path(prefix: str) -> bool:
    # Serve reserves paths that start with /-.
    return prefix == "/" or bool(re.fullmatch(r"(/(?!-)[A-Za-z0-9._~-]+)+", prefix))


def _refuse_twins(found: list[Application], where: str) -> None:
    for what, names in (
        ("the model_id", [each.config.model_id for each in found]),
        ("the name", [each.name for each in found]),
        ("the route_prefix", [each.route_prefix for each in found]),
    ):
        for name in _twice(names):
            raise ValueError(f"{where}: {what} {name!r} stands twice; each model needs its own")


def _twice(names: list[str]) -> Iterator[str]:
    yield from (name for at, name in enumerate(names) if name in names[:at])
