"""`diffray serve` on the command line."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.cli import flags
from diffray.cluster.cli.commands import Fields, Given, one_sentence, refuse, typed_names
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.yaml_file import read_yaml
from diffray.cluster.serve.address import (
    API_KEY,
    OPERATOR_KEY,
    Server,
    prepare,
    prepare_server,
    reserved,
    take_keys,
)
from diffray.cluster.serve.deployment import Deployment, PlacementGroup
from diffray.cluster.serve.supervisor import say, supervised
from diffray.components.checkpoints.demos import NAMES
from diffray.components.policy import DiffusionParams

if TYPE_CHECKING:
    from diffray.cluster.serve.app_config import AppConfig
    from diffray.cluster.serve.config_file import Applications

# The flags of `diffray serve` alone: vLLM's names, with SGLang's as aliases.
Models = Annotated[
    list[str] | None,
    typer.Argument(
        help=f"{flags.CHECKPOINT} Several share one endpoint.",
        metavar="MODEL",
        autocompletion=lambda: [*NAMES],
    ),
]
ConfigFile = Annotated[
    Path | None, Option(help="A YAML file that describes one or more models, instead of flags.")
]
PrintConfig = Annotated[
    bool, Option("--print-config", help="Print the configuration for `serve deploy` and exit.")
]
PolicyFile = Annotated[
    Path | None,
    Option(
        "--diffusion",
        metavar="FILE.yaml",
        help="The default policy as YAML, such as one that `diffray tune` wrote.",
        rich_help_panel="Diffusion",
    ),
]
Replicas = Annotated[
    str,
    Option(
        metavar="N|MIN:MAX",
        help="How many engines to run: N, or MIN:MAX to autoscale.",
        rich_help_panel="Replicas",
    ),
]
Listening = Annotated[
    Given,
    Fields(Server, "Server", "host", "port", "dashboard"),
    Fields(Server, "Replicas", "address"),
]
Api = Annotated[
    Given,
    Fields(
        ApiSettings,
        "Server",
        *("files", "allowed_media_domains", "ignore_unknown_fields", "vllm_metric_names", "page"),
        api_keys=Option("--api-key", envvar=API_KEY),
        operator_keys=Option("--operator-key", "--admin-api-key", envvar=OPERATOR_KEY),
        cors_origins=Option("--allowed-origins"),
    ),
]
Layout = Annotated[
    flags.Sizes,
    Fields(
        EngineConfig,
        "Layout",
        *("max_queued_requests", "scheduling_policy", "steps_per_round"),
        *("draft_overhead", "cpu_threads"),
        swap_space=Option(metavar="GIB|SIZE", parser=str),
        prefix_cache_ttl=Option(metavar="SECONDS"),
    ),
]
Routing = Annotated[Given, Fields(Deployment, "Replicas", "prefix_routing")]
Placement = Annotated[Given, Fields(PlacementGroup, "Replicas", strategy=Option("--placement"))]


def serve(
    context: typer.Context,
    models: Models = None,
    *,
    model_path: Annotated[
        str | None, Option("--model", "--model-path", help="The same as the argument.")
    ] = None,
    served_model_name: Annotated[str | None, Option(help="The model's name in requests.")] = None,
    listening: Listening,
    api: Api,
    config: ConfigFile = None,
    print_config: PrintConfig = False,
    diffusion: flags.Diffusion,
    policy: PolicyFile = None,
    settings: flags.Settings = None,
    replicas: Replicas = "1",
    routing: Routing,
    placement: Placement,
    layout: Layout,
    engine: flags.Engine,
) -> None:
    """Serve models through an OpenAI-compatible API on Ray.

    Without a model it serves demo, a toy. The server has a page at /, its API at /docs.
    """
    keys = {
        API_KEY: take_keys(api.pop("api_keys", ()), API_KEY),
        OPERATOR_KEY: take_keys(api.pop("operator_keys", ()), OPERATOR_KEY),
    }

    def described() -> "Applications":
        _refuse_what_has_no_effect(context)
        if config is not None:
            return _configured(config, keys)
        if models and model_path:
            raise ValueError("the model is given twice; leave --model out")
        return _described(
            typed_names(context),
            models or [model_path or "demo"],
            served_model_name,
            engine_kwargs=engine | layout,
            diffusion=_policy(policy) | _diffusion(diffusion, settings),
            deployment_config=_deployment(replicas) | routing,
            placement_group_config=placement,
            api=api | _keys_as_options(keys),
        )

    if print_config:
        _print(described())
        return
    with supervised() as ending, one_sentence():
        applications, server = described(), Server(**listening)
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
    given, listening = context.params, {*Server.model_fields}
    if given["config"] is not None:
        refuse(context, "with --config", {*given} - listening - {"config", "print_config"})
    if given["print_config"]:
        refuse(context, "with --print-config", listening)
    if given["address"] is not None:
        refuse(context, "with --address", ("dashboard",))


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
    typed: Mapping[str, str], models: list[str], name: str | None, **sections: Given
) -> "Applications":
    """Return the applications that the flags describe: each model with the same options.

    `typed` are the flags as they were typed, by the options that they set.
    """
    from diffray.cluster.serve.config_file import applications

    if name is not None and len(models) > 1:
        raise ValueError(
            "--served-model-name names one model; to name several, describe them in a --config file"
        )
    given = {section: options for section, options in sections.items() if options}
    described = [
        {"model_loading_config": {"model_id": name or model, "model_source": model}} | given
        for model in models
    ]
    unnamed = dict.fromkeys(given, "--set") | {"deployment_config": "--replicas"}
    paths = {
        f"{section}.{option}": typed.get(option, unnamed[section])
        for section, options in given.items()
        for option in options
    }
    paths |= {"model_loading_config": "--served-model-name" if name else "MODEL"}
    paths |= dict.fromkeys(given, "")  # what is said about several flags names them
    return applications(described, "the flags", paths)


def _deployment(replicas: str) -> dict[str, Any]:
    """Return the options of a Serve deployment with N or MIN:MAX replicas."""
    low, colon, high = replicas.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()):
        raise ValueError(f"--replicas {replicas!r}: give N or MIN:MAX, such as 1:4")
    if not colon:
        return {} if int(low) == 1 else {"num_replicas": int(low)}
    return {"autoscaling_config": {"min_replicas": int(low), "max_replicas": int(high)}}


def _diffusion(given: Given, settings: list[str] | None) -> dict[str, Any]:
    """Return the diffusion parameters that were typed: the defaults of requests."""
    if not given and not settings:
        return {}
    params = flags.sampling_params(given, settings)
    others = params.model_fields_set - {"diffusion"}
    if others:
        raise ValueError(f"--set {others.pop()}: only the parts of diffusion have server defaults")
    return params.diffusion.model_dump(exclude_unset=True)


def _policy(path: Path | None) -> dict[str, Any]:
    """Return the diffusion parameters of a YAML file; typed ones override them."""
    if path is None:
        return {}
    given = read_yaml(path)
    if not isinstance(given, dict):
        raise ValueError(f"--diffusion {path}: expected parts of diffusion, such as cache: dual")
    try:
        return DiffusionParams(**given).model_dump(exclude_unset=True)
    except ValueError as error:
        raise ValueError(f"--diffusion {path}: {error}") from None


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
    for each, found in zip(applications.models, configs, strict=True):
        try:
            _check_model(each.config, found)
        except ValueError as error:
            which = f"{each.title}: " if len(configs) > 1 else ""
            raise ValueError(f"{which}{error}") from None


def _check_model(config: "AppConfig", found: Mapping[str, object]) -> None:
    import torch

    from diffray.components.mesh import Mesh
    from diffray.components.models.registry import build_model, check_ranks, check_sharing
    from diffray.components.policy import DiffusionParams, Policy

    engine = config.engine_kwargs
    check_ranks(found, engine.tensor_parallel_size, expert_parallel=engine.expert_parallel)
    requested = engine.prefix_options
    if config.deployment_config.prefix_routing:
        requested = [*requested, "prefix_routing"]
    check_sharing(found, requested, engine.first_step_caching)
    spec = build_model(found, Mesh(), torch.float32).spec
    spec.context(engine.max_model_len)
    Policy.resolve(DiffusionParams().over(config.diffusion), spec)
    if engine.lora_modules:
        from diffray.workers.adapters import LoadedAdapters

        given = config.model_source, engine.lora_modules, engine.max_lora_rank
        LoadedAdapters.of(*given, reserved=(config.model_id,))
