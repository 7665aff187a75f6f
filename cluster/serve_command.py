"""`diffray serve` on the command line: vLLM's flag names, SGLang's as aliases."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffray.cluster import flags
from diffray.cluster.environment import API_KEY, has_haproxy, hide_keys, prepare
from diffray.cluster.failures import one_sentence
from diffray.components.demos import DEMOS

if TYPE_CHECKING:
    from diffray.cluster.config_file import Application

STRICT_PACK = "STRICT_PACK"
_SERVER, _LAYOUT, _REPLICAS = "Server", "Layout", "Replicas"

ServedModel = Annotated[
    str | None,
    typer.Argument(
        help="A checkpoint's folder, a Hugging Face Hub id, or one of: " + ", ".join(DEMOS) + "."
    ),
]


def _option(*names: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def serve(
    model: ServedModel = None,
    model_path: Annotated[
        str | None, _option("--model", "--model-path", text="The same, as a flag.", panel="Model")
    ] = None,
    served_model_name: Annotated[
        str | None, _option("--served-model-name", text="Its name in requests.", panel="Model")
    ] = None,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
    kernels: flags.Kernels = "auto",
    cuda_graphs: flags.CudaGraphs = None,
    mask_token_id: flags.MaskTokenId = None,
    eos_token_id: flags.EosTokenId = None,
    tp: Annotated[
        int,
        _option(
            "--tensor-parallel-size",
            "--tp",
            "--tp-size",
            "-tp",
            text="Ranks that share the model.",
            panel=_LAYOUT,
        ),
    ] = 1,
    ep: Annotated[
        bool,
        _option(
            "--enable-expert-parallel",
            "--ep",
            text="Deal whole experts out over the ranks.",
            panel=_LAYOUT,
        ),
    ] = False,
    max_model_len: Annotated[
        int | None,
        _option(
            "--max-model-len",
            "--context-length",
            text="Positions of the longest prompt with its answer.",
            panel=_LAYOUT,
        ),
    ] = None,
    max_num_seqs: Annotated[
        int,
        _option(
            "--max-num-seqs",
            "--max-running-requests",
            text="Sequences that run together.",
            panel=_LAYOUT,
        ),
    ] = 16,
    max_queued_requests: Annotated[
        int, _option("--max-queued-requests", text="More are refused with 429.", panel=_LAYOUT)
    ] = 256,
    kv_cache_memory: Annotated[
        int | None, _option("--kv-cache-memory", text="Bytes on each rank.", panel=_LAYOUT)
    ] = None,
    steps_per_round: Annotated[
        int, _option("--steps-per-round", text="Steps between two looks.", panel=_LAYOUT)
    ] = 1,
    cpu_threads: Annotated[
        int | None, _option("--cpu-threads", text="Of each rank on CPU.", panel=_LAYOUT)
    ] = None,
    block_length: flags.BlockLength = None,
    decoder: flags.Decoder = None,
    cache: flags.Cache = None,
    iteration: flags.Iteration = None,
    settings: flags.Settings = None,
    replicas: Annotated[
        str, _option("--replicas", text="N, or MIN:MAX.", panel=_REPLICAS, metavar="N|MIN:MAX")
    ] = "1",
    strategy: Annotated[
        str,
        _option("--placement", text="STRICT_PACK: one node; PACK: may span.", panel=_REPLICAS),
    ] = STRICT_PACK,
    address: Annotated[
        str | None,
        _option("--address", text="A running Ray cluster, as auto.", panel=_REPLICAS),
    ] = None,
    host: Annotated[str, _option("--host", text="To listen on.", panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, _option("--port", text="To listen on.", panel=_SERVER)] = 8000,
    api_key: Annotated[
        list[str] | None,
        _option(
            "--api-key",
            text="Requests must show one; repeatable. From the variable, no shell remembers it.",
            panel=_SERVER,
            envvar=API_KEY,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        _option(
            "--allowed-origins",
            text="Pages that browsers may ask from, as https://chat.example.com; repeatable.",
            panel=_SERVER,
        ),
    ] = None,
    haproxy: Annotated[
        bool,
        _option(
            "--haproxy/--no-haproxy", text="Ray Serve's faster proxy, if installed.", panel=_SERVER
        ),
    ] = True,
    dashboard: Annotated[
        bool, _option("--dashboard", text="Start Ray's dashboard too.", panel=_SERVER)
    ] = False,
    config: Annotated[
        Path | None,
        _option("--config", text="A YAML file with models, instead of flags.", panel=_SERVER),
    ] = None,
    print_config: Annotated[
        bool,
        _option("--print-config", text="Print what `serve deploy` reads, and end.", panel=_SERVER),
    ] = False,
) -> None:
    """Serve a model with an OpenAI-compatible API on Ray, until Ctrl-C."""
    with one_sentence():
        if model and model_path:
            raise ValueError("the model is given twice; leave --model out")
        named = model or model_path
        typed = {
            "block_length": block_length,
            "decoder.kind": decoder,
            "cache.kind": cache,
            "iteration.kind": iteration,
        }
        engine = {
            "tensor_parallel_size": tp,
            "expert_parallel": ep,
            "device": device,
            "dtype": dtype,
            "kernels": kernels,
            "cuda_graphs": cuda_graphs,
            "mask_token_id": mask_token_id,
            "eos_token_id": tuple(eos_token_id) if eos_token_id else None,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_queued_requests": max_queued_requests,
            "kv_cache_memory": kv_cache_memory,
            "steps_per_round": steps_per_round,
            "cpu_threads": cpu_threads,
        }
        wanted = _wanted(
            config,
            named,
            served_model_name,
            engine=engine,
            diffusion=_diffusion(typed, settings or ()),
            deployment=_replicas(replicas),
            strategy=strategy,
            api={"api_keys": api_key or [], "cors_origins": allowed_origins or []},
        )
        if print_config:
            _print(wanted)
            return
        _check_models(wanted)
        # A running cluster has its proxies already, or the settings for them.
        prepare(haproxy=has_haproxy() and haproxy and address is None)
        if api_key:
            hide_keys(api_key)
        from diffray.cluster.serve import Server, run_server, to_stderr

        server = Server(host, port, address, dashboard)
        run_server(wanted, server, to_stderr)


def _wanted(
    config: Path | None,
    model: str | None,
    name: str | None,
    *,
    engine: dict[str, Any],
    diffusion: dict[str, Any],
    deployment: dict[str, Any],
    strategy: str,
    api: dict[str, list[str]],
) -> "tuple[Application, ...]":
    """Return the applications of the file, or the one that the flags describe."""
    from diffray.cluster.config import EngineConfig
    from diffray.cluster.config_file import applications, read_applications

    defaults = EngineConfig()
    said = {key: value for key, value in engine.items() if value != getattr(defaults, key)}
    api = {key: value for key, value in api.items() if value}
    if config is not None:
        if model or name or said or diffusion or deployment or api or strategy != STRICT_PACK:
            raise ValueError("--config describes everything; leave the model and its flags out")
        return read_applications(config)
    source = model or "demo"
    options: dict[str, Any] = {
        "model_loading_config": {"model_id": name or source, "model_source": source},
        "engine_kwargs": said,
        "diffusion": diffusion,
        "deployment_config": deployment,
        "placement_group_config": {"strategy": strategy},
        "api": api,
    }
    return applications({key: value for key, value in options.items() if value}, "the flags")


def _diffusion(typed: dict[str, Any], settings: Any) -> dict[str, Any]:
    """Return the requests' default policy, as far as it was typed."""
    if not settings and not any(typed.values()):
        return {}
    from diffray.cluster.options import sampling_params

    params = sampling_params(typed, settings)
    others = params.model_fields_set - {"diffusion"}
    if others:
        raise ValueError(f"--set {others.pop()}: only the parts of diffusion have server defaults")
    return params.diffusion.model_dump(exclude_unset=True)


def _replicas(text: str) -> dict[str, Any]:
    low, colon, high = text.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()):
        raise ValueError(f"--replicas {text!r}: give N or MIN:MAX, as 1:4")
    if not colon:
        return {} if int(low) == 1 else {"num_replicas": int(low)}
    return {"autoscaling_config": {"min_replicas": int(low), "max_replicas": int(high)}}


def _print(wanted: "tuple[Application, ...]") -> None:
    import yaml

    from diffray.cluster.config_file import serve_config

    typer.echo(yaml.safe_dump(serve_config(wanted), sort_keys=False), nl=False)


def _check_models(wanted: "tuple[Application, ...]") -> None:
    """Refuse a checkpoint that cannot be there, before a cluster is started for it."""
    from diffray.components.checkpoint import read_config, resolve
    from diffray.components.models.registry import check_ranks

    for each in wanted:
        engine = each.config.engine_kwargs
        found = read_config(resolve(each.config.model_source))
        check_ranks(found, engine.tensor_parallel_size, expert_parallel=engine.expert_parallel)
