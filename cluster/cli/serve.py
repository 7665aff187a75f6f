"""`diffray serve` on the command line."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from diffray.cluster.cli import flags
from diffray.cluster.cli import serve_options as own
from diffray.cluster.cli.failures import one_sentence
from diffray.cluster.cli.flag_records import (
    names_of,
    paths_to_flags,
    refuse_flags,
    spread,
    typed,
)
from diffray.cluster.serve.address import Server, reserved
from diffray.cluster.serve.environment import (
    API_KEY,
    OPERATOR_KEY,
    prepare,
    prepare_server,
    take_keys,
)
from diffray.cluster.serve.supervisor import say, supervised

if TYPE_CHECKING:
    from pathlib import Path

    from diffray.cluster.serve.config_file import Applications

# The records of flags that set the options of each section of a configuration.
_SECTIONS: dict[str, tuple[Any, ...]] = {
    "engine_kwargs": (flags.Engine, own.Layout),
    "deployment_config": (own.Routing,),
    "placement_group_config": (own.Placement,),
    "api": (own.Api,),
}


@spread
def serve(
    context: typer.Context,
    models: own.Positional = None,
    *,
    naming: own.Naming,
    listening: own.Listening,
    api: own.Api,
    file: own.File,
    diffusion: flags.Diffusion,
    replicas: own.Replicas = "1",
    routing: own.Routing,
    placement: own.Placement,
    layout: own.Layout,
    engine: flags.Engine,
) -> None:
    """Serve models through an OpenAI-compatible API on Ray.

    Without a model it serves demo, a toy. The server has a page at /, its API at /docs.
    """
    api_typed, where = typed(api), typed(listening)
    keys = {
        API_KEY: take_keys(api_typed.pop("api_keys", ()), API_KEY),
        OPERATOR_KEY: take_keys(api_typed.pop("operator_keys", ()), OPERATOR_KEY),
    }

    def described() -> "Applications":
        _refuse_what_has_no_effect(context)
        if file.config is not None:
            return _configured(file.config, keys)
        if models and naming.model_path:
            raise ValueError("the model is given twice; leave --model out")
        return _described(
            context,
            models or [naming.model_path or "demo"],
            naming.served_model_name,
            engine_kwargs=typed(engine) | typed(layout),
            diffusion=_diffusion(diffusion),
            deployment_config=own.deployment(replicas) | typed(routing),
            placement_group_config=typed(placement),
            api=api_typed | _keys_as_options(keys),
        )

    if file.print_config:
        _print(described())
        return
    with supervised() as ending, one_sentence():
        applications, server = described(), Server(**where)
        found = _read_configs(applications)
        check = partial(_check_models, applications, found)
        begun = "Starting Ray on this machine ..." if server.address is None else ""
        with reserved(server), ending.unless_passed(check, begun) as checked:
            _set_environment(applications, server)
            from diffray.cluster.serve.server import run_server

            run_server(applications, server, ending, say, checked)


def _set_environment(applications: "Applications", server: Server) -> None:
    """Set the variables that Ray reads when it starts, or when a running cluster is joined."""
    if server.address is not None:  # that cluster already has proxies, or settings for them
        prepare(server.address)
        return
    prepare_server([each.route_prefix for each in applications.all], applications.prefix_routed)


def _refuse_what_has_no_effect(context: typer.Context) -> None:
    given, listening = context.params, names_of(own.Listening)
    if given["config"] is not None:
        refuse_flags(context, "with --config", {*given} - listening - names_of(own.File))
    if given["print_config"]:
        refuse_flags(context, "with --print-config", listening)
    if given["address"] is not None:
        refuse_flags(context, "with --address", ("dashboard",))


def _keys_as_options(keys: dict[str, list[str]]) -> dict[str, Any]:
    given = {"api_keys": keys[API_KEY], "operator_keys": keys[OPERATOR_KEY]}
    return {name: found for name, found in given.items() if found}


def _configured(path: "Path", keys: dict[str, list[str]]) -> "Applications":
    """Return the applications of a YAML file."""
    from diffray.cluster.serve.config_file import read_applications

    for variable, option in ((API_KEY, "api_key_env"), (OPERATOR_KEY, "operator_key_env")):
        if keys[variable]:
            raise ValueError(
                f"{variable} has no effect with --config; unset it and name a variable in the "
                f"file, as {option}: KEYS"
            )
    return read_applications(path)


def _described(
    context: typer.Context, models: list[str], name: str | None, **options: Any
) -> "Applications":
    """Return the applications that the flags describe: each model with the same options."""
    from diffray.cluster.serve.config_file import applications

    if name is not None and len(models) > 1:
        raise ValueError(
            "--served-model-name names one model; to name several, describe them in a --config file"
        )
    given = {key: value for key, value in options.items() if value}
    described = [
        {"model_loading_config": {"model_id": name or model, "model_source": model}} | given
        for model in models
    ]
    paths = {f"deployment_config.{each}": "--replicas" for each in own.SET_BY_REPLICAS}
    paths |= {"model_loading_config": "--served-model-name" if name else "MODEL"}
    paths |= dict.fromkeys(_SECTIONS, "")  # what is said about several flags names them
    return applications(described, "the flags", paths | paths_to_flags(context, _SECTIONS))


def _diffusion(given: flags.Diffusion) -> dict[str, Any]:
    """Return the diffusion parameters that were typed: the defaults of requests."""
    if not typed(given):
        return {}
    from diffray.cluster.cli.request_options import sampling_params

    params = sampling_params(flags.Sampling(), given)
    others = params.model_fields_set - {"diffusion"}
    if others:
        raise ValueError(f"--set {others.pop()}: only the parts of diffusion have server defaults")
    return params.diffusion.model_dump(exclude_unset=True)


def _print(applications: "Applications") -> None:
    import yaml

    from diffray.cluster.serve.config_file import serve_config

    typer.echo(yaml.safe_dump(serve_config(applications), sort_keys=False), nl=False)


def _read_configs(applications: "Applications") -> list[Mapping[str, object]]:
    """Return each checkpoint's config.json; refuse one that is missing before Ray is started."""
    from diffray.components.checkpoints.folder import read_config, resolve

    return [read_config(resolve(each.config.model_source)) for each in applications.models]


@one_sentence()
def _check_models(applications: "Applications", configs: list[Mapping[str, object]]) -> None:
    """Refuse a checkpoint that cannot be served, while Ray starts: it takes torch, and seconds."""
    import torch

    from diffray.components.mesh import Mesh
    from diffray.components.models.registry import build_model, check_ranks, check_sharing
    from diffray.components.policy import DiffusionParams, Policy

    for each, found in zip(applications.models, configs, strict=True):
        engine = each.config.engine_kwargs
        check_ranks(found, engine.tensor_parallel_size, expert_parallel=engine.expert_parallel)
        requested = engine.prefix_options
        if each.config.deployment_config.prefix_routing:
            requested = [*requested, "prefix_routing"]
        check_sharing(found, requested, engine.first_step_caching)
        spec = build_model(found, Mesh(), torch.float32).spec
        Policy.resolve(DiffusionParams().over(each.config.diffusion), spec)
        if engine.lora_modules:
            from diffray.workers.adapters import LoadedAdapters

            given = each.config.model_source, engine.lora_modules, engine.max_lora_rank
            LoadedAdapters.of(*given, reserved=(each.config.model_id,))
