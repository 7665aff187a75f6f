"""`diffray serve` on the command line."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diffray.cluster.cli import flags
from diffray.cluster.cli import serve_options as own
from diffray.cluster.cli.failures import one_sentence
from diffray.cluster.cli.flag_records import spread
from diffray.cluster.serve.address import Server
from diffray.cluster.serve.environment import prepare, prepare_server, take_keys
from diffray.cluster.serve.haproxy import has_haproxy
from diffray.cluster.serve.supervisor import say, supervised

if TYPE_CHECKING:
    from diffray.cluster.serve.config_file import Application


@spread
def serve(
    model: own.Positional = None,
    model_path: own.ModelPath = None,
    served_model_name: own.ServedName = None,
    *,
    engine: flags.Engine,
    layout: own.Layout,
    diffusion: flags.Diffusion,
    replicas: own.Replicas,
    listening: own.Listening,
    config: own.ConfigFile = None,
    print_config: own.PrintConfig = False,
) -> None:
    """Serve a model through an OpenAI-compatible API on Ray."""
    keys = take_keys(listening.api_key or ())

    def wanted() -> "tuple[Application, ...]":
        if model and model_path:
            raise ValueError("the model is given twice; leave --model out")
        return _wanted(
            config,
            model or model_path,
            served_model_name,
            engine=layout.typed() | engine.typed(),
            diffusion=_diffusion(diffusion),
            replicas=replicas,
            api=listening.api(keys),
        )

    if print_config:
        with one_sentence():
            _print(wanted())
        return
    with supervised() as ending, one_sentence():
        applications = wanted()
        _check_models(applications)
        if replicas.address is None:
            routes = [each.route_prefix for each in applications]
            use_haproxy = listening.haproxy and has_haproxy()
            prepare_server(routes, haproxy=ending.folder if use_haproxy else None)
        else:  # which has its proxies already, or the settings for them
            prepare(replicas.address)
        from diffray.cluster.serve.server import run_server

        server = Server(listening.host, listening.port, replicas.address, listening.dashboard)
        run_server(applications, server, ending, say)


def _wanted(
    config: Path | None,
    model: str | None,
    name: str | None,
    *,
    engine: dict[str, Any],
    diffusion: dict[str, Any],
    replicas: own.Replicas,
    api: dict[str, Any],
) -> "tuple[Application, ...]":
    """Return the applications of the file, or the one that the flags describe."""
    from diffray.cluster.control.engine_config import EngineConfig
    from diffray.cluster.serve.config_file import applications, read_applications

    defaults, deployment = EngineConfig(), replicas.deployment()
    said = {key: value for key, value in engine.items() if value != getattr(defaults, key)}
    api = {key: value for key, value in api.items() if value}
    if config is not None:
        moved = replicas.strategy != own.STRICT_PACK
        if any((model, name, said, diffusion, deployment, api, moved)):
            raise ValueError("--config describes everything; leave the model and its flags out")
        return read_applications(config)
    source = model or "demo"
    options: dict[str, Any] = {
        "model_loading_config": {"model_id": name or source, "model_source": source},
        "engine_kwargs": said,
        "diffusion": diffusion,
        "deployment_config": deployment,
        "placement_group_config": {"strategy": replicas.strategy},
        "api": api,
    }
    return applications({key: value for key, value in options.items() if value}, "the flags")


def _diffusion(given: flags.Diffusion) -> dict[str, Any]:
    """Return the requests' default policy, as far as it was typed."""
    typed, settings = given.typed(), given.settings
    if not settings and not any(typed.values()):
        return {}
    from diffray.cluster.cli.options import sampling_params

    params = sampling_params(typed, settings or ())
    others = params.model_fields_set - {"diffusion"}
    if others:
        raise ValueError(f"--set {others.pop()}: only the parts of diffusion have server defaults")
    return params.diffusion.model_dump(exclude_unset=True)


def _print(wanted: "tuple[Application, ...]") -> None:
    import yaml

    from diffray.cluster.serve.config_file import serve_config

    typer.echo(yaml.safe_dump(serve_config(wanted), sort_keys=False), nl=False)


def _check_models(wanted: "tuple[Application, ...]") -> None:
    """Refuse a checkpoint that cannot be there, before a cluster is started for it."""
    from diffray.components.checkpoints.checkpoint import read_config, resolve
    from diffray.components.models.registry import check_prefix_caching, check_ranks

    for each in wanted:
        engine = each.config.engine_kwargs
        found = read_config(resolve(each.config.model_source))
        check_ranks(found, engine.tensor_parallel_size, expert_parallel=engine.expert_parallel)
        if engine.enable_prefix_caching:
            check_prefix_caching(found)
