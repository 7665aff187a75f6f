"""Makes docs/configuration.md from the models that declare the options.

`python -m tools.configuration_page` writes it; a test fails where the file is not current.
"""

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import typer
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.main import get_command

from diffray.cluster.api.settings import ApiSettings, GenerationDefaults
from diffray.cluster.cli.main import app
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.address import Server
from diffray.cluster.serve.app_config import AppConfig, IngressConfig
from diffray.cluster.serve.deployment import (
    Autoscaling,
    Backpressure,
    Deployment,
    ModelLoading,
    PlacementGroup,
)
from diffray.components.params import SamplingParams
from diffray.components.policy import AnyCache, AnyDecoder, AnyIteration, DiffusionParams
from diffray.components.speculation import Verify
from diffray.workers.engine_options import EngineOptions

PAGE = Path(__file__).parents[1] / "docs/configuration.md"

HEAD = """# Configuration

Every option, its type, its default and what it does. `make docs` writes this page from the models
that declare the options; the flags of the command line and the checks of YAML files and requests
come from the same models.

An option that is unknown, out of range or without effect is refused with a sentence that names it.

- [Engine](#engine): `DiffusionLLM(...)`, flags of `diffray serve`, `engine_kwargs` in YAML
- [Server](#server): flags of `diffray serve`
- [Deployment](#deployment): YAML files
- [Requests](#requests): `SamplingParams`, bodies of HTTP requests, `--set`
"""


def page() -> str:
    """Return the whole document."""
    return "\n".join([HEAD, *_engine(), *_server(), *_deployment(), *_requests()])


def _engine() -> Iterator[str]:
    flags = _flags("serve")
    own = {
        n: f for n, f in EngineConfig.model_fields.items() if n not in EngineOptions.model_fields
    }
    yield "## Engine\n"
    yield "Python: `DiffusionLLM(model, max_num_seqs=32)`. YAML: below `engine_kwargs`."
    yield "Options without a flag are given in Python or YAML.\n"
    yield from _table(EngineOptions.model_fields, flags)
    yield "`DiffusionLLM` also takes `diffusion`, the default [diffusion parameters](#diffusion) of"
    yield "all requests.\n"
    yield "### On a cluster\n"
    yield "`diffray serve` and `engine_kwargs` have these as well, `DiffusionLLM` the first two.\n"
    yield from _table(own, flags)


def _server() -> Iterator[str]:
    yield "## Server\n"
    yield "Where `diffray serve` listens, and on which Ray.\n"
    yield from _table(Server.model_fields, _flags("serve"))
    yield "How the endpoint behaves; in YAML below `api`.\n"
    yield from _table(ApiSettings.model_fields, _flags("serve"))


def _deployment() -> Iterator[str]:
    yield "## Deployment\n"
    yield "One model in a YAML file for `diffray serve --config`, or `args` for Ray's own commands"
    yield "([deploy.md](deploy.md)). `--replicas N` sets `num_replicas`, `--replicas MIN:MAX` the"
    yield "`autoscaling_config`.\n"
    yield from _table(AppConfig.model_fields, {})
    for name, kind in (
        ("model_loading_config", ModelLoading),
        ("deployment_config", Deployment),
        ("deployment_config.autoscaling_config", Autoscaling),
        ("deployment_config.backpressure_config", Backpressure),
        ("placement_group_config", PlacementGroup),
        ("generation_defaults", GenerationDefaults),
    ):
        yield f"### {name}\n"
        yield f"{_first_line(kind)}\n"
        yield from _table(kind.model_fields, _flags("serve") if kind is PlacementGroup else {})
    yield "### ingress\n"
    yield f"{_first_line(IngressConfig)}"
    yield "In a file it stands beside `llm_configs`; for Ray's own commands it is the `args` of"
    yield "`diffray.cluster.app:ingress`.\n"
    yield from _table(IngressConfig.model_fields, {})


def _requests() -> Iterator[str]:
    yield "## Requests\n"
    yield "`SamplingParams(max_tokens=64)`, or the body of an HTTP request. Over HTTP, the server's"
    yield "[generation_defaults](#generation_defaults) and the checkpoint fill in what is left out."
    yield "On the command line, those without a flag are `--set NAME=VALUE`.\n"
    request = _flags("generate")
    yield from _table(SamplingParams.model_fields, request)
    yield "### diffusion\n"
    yield "Below `diffusion` in a request, in `DiffusionLLM(diffusion=...)` and in YAML.\n"
    kinds = {name: f"`--{name} KIND`" for name in ("iteration", "decoder", "cache")}
    yield from _table(DiffusionParams.model_fields, request | kinds)
    unions = {"decoder": AnyDecoder, "cache": AnyCache, "iteration": AnyIteration}
    parts = {name: get_args(get_args(union)[0]) for name, union in unions.items()}
    for name, several in (parts | {"speculation": (Verify,)}).items():
        for kind in several:
            said = kind.model_fields["kind"].default
            yield f"#### {name}: {said}\n"
            yield f"{_first_line(kind)}\n"
            fields = {n: field for n, field in kind.model_fields.items() if n != "kind"}
            if fields:
                yield from _table(fields, {n: f"`--set {name}.{n}=`" for n in fields})


def _first_line(kind: type[BaseModel]) -> str:
    return (kind.__doc__ or "").partition("\n")[0].strip()


def _flags(command: str) -> dict[str, str]:
    """Return the flags of a command by the names of its parameters, all aliases named."""
    group: Any = get_command(app)
    _, found, _ = group.resolve_command(typer.Context(group), [command])
    return {
        each.name: ", ".join(f"`{flag}`" for flag in (*each.opts, *each.secondary_opts))
        for each in found.params
        if each.param_type_name == "option"
    }


def _table(fields: Mapping[str, FieldInfo], flags: Mapping[str, str]) -> Iterator[str]:
    flag = any(name in flags for name in fields)
    yield "| Option | " + ("Flag | " if flag else "") + "Type | Default | Description |"
    yield "|---|" + ("---|" if flag else "") + "---|---|---|"
    for name, field in fields.items():
        cells = [f"`{name}`", *([flags.get(name, "")] if flag else [])]
        cells += [_type(field), _default(field), field.description or ""]
        yield "| " + " | ".join(cells) + " |"
    yield ""


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return ""
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None or field.default == () or isinstance(field.default, BaseModel):
        kind = getattr(field.default, "kind", None)
        return f"`{kind}`" if kind else ""
    return f"`{field.default}`"


def _type(field: FieldInfo) -> str:
    """Return a field's type and bounds in a few words."""
    signs = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}
    bounds = [
        f"{sign} {getattr(bound, kind.__name__.lower())}"
        for bound in field.metadata
        for kind, sign in signs.items()
        if isinstance(bound, kind)
    ]
    # Bounds of 64 bits say nothing to a reader.
    told = [bound for bound in bounds if len(bound) < 12]
    return ", ".join([_words(field.annotation), *told])


def _words(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        kinds = [_words(part) for part in parts if part is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"list of {_words(parts[0])}"
    if origin is dict:
        return f"{_words(parts[0])} to {_words(parts[1])}"
    if parts:  # Annotated
        return _words(parts[0])
    if issubclass(annotation, BaseModel):
        return "a kind" if "kind" in annotation.model_fields else "mapping"
    return {"str": "text", "int": "int", "float": "number", "bool": "bool"}[annotation.__name__]


if __name__ == "__main__":
    PAGE.write_text(page())
