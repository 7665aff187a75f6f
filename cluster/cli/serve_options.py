"""The flags of `diffray serve` beside those of the model: vLLM's names, SGLang's as aliases."""

from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.cli.flag_records import Flag, Options
from diffray.cluster.cli.flags import CHECKPOINT
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.address import Server
from diffray.cluster.serve.deployment_options import PlacementGroup
from diffray.cluster.serve.environment import API_KEY

_MODEL, _SERVER, _LAYOUT, _REPLICAS = "Model", "Server", "Layout", "Replicas"


Positional = Annotated[str | None, typer.Argument(help=CHECKPOINT)]
ModelPath = Annotated[
    str | None,
    typer.Option(
        "--model", "--model-path", help="The same as the argument.", rich_help_panel=_MODEL
    ),
]
ServedName = Annotated[
    str | None, typer.Option(help="The model's name in requests.", rich_help_panel=_MODEL)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A YAML file that describes one or more models, instead of flags.",
        rich_help_panel=_SERVER,
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config",
        help="Print the configuration for `serve deploy` and exit.",
        rich_help_panel=_SERVER,
    ),
]
Replicas = Annotated[
    str,
    typer.Option(
        help="How many engines to run: N, or MIN:MAX to autoscale.",
        rich_help_panel=_REPLICAS,
        metavar="N|MIN:MAX",
    ),
]


class Layout(Options):
    """How an engine is laid out over its ranks, and how many requests it takes."""

    model = EngineConfig
    panel = _LAYOUT
    flags: ClassVar = {
        "tensor_parallel_size": Flag(("--tensor-parallel-size", "--tp", "--tp-size", "-tp")),
        "expert_parallel": Flag(("--enable-expert-parallel", "--ep")),
        "max_model_len": Flag(("--max-model-len", "--context-length")),
        "max_num_seqs": Flag(("--max-num-seqs", "--max-running-requests")),
        "max_queued_requests": Flag(),
        "scheduling_policy": Flag(),
        "kv_cache_memory": Flag(metavar="SIZE", type=str),
        "steps_per_round": Flag(),
        "cpu_threads": Flag(),
    }


class Placement(Options):
    """Where a replica's ranks may run."""

    model = PlacementGroup
    panel = _REPLICAS
    flags: ClassVar = {"strategy": Flag(("--placement",))}


class Listening(Options):
    """Where requests come in, and on which Ray."""

    model = Server
    panel = _SERVER
    flags: ClassVar = {
        "address": Flag(panel=_REPLICAS),
        "host": Flag(),
        "port": Flag(),
        "haproxy": Flag(),
        "dashboard": Flag(),
    }


class Api(Options):
    """Whose requests are answered, and how."""

    model = ApiSettings
    panel = _SERVER
    flags: ClassVar = {
        "api_keys": Flag(("--api-key",), envvar=API_KEY),
        "cors_origins": Flag(("--allowed-origins",)),
        "vllm_metric_names": Flag(),
    }


def deployment(replicas: str) -> dict[str, Any]:
    """Return the options of a Serve deployment with so many replicas."""
    low, colon, high = replicas.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()):
        raise ValueError(f"--replicas {replicas!r}: give N or MIN:MAX, as 1:4")
    if not colon:
        return {} if int(low) == 1 else {"num_replicas": int(low)}
    return {"autoscaling_config": {"min_replicas": int(low), "max_replicas": int(high)}}
