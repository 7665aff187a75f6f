"""The flags of `diffray serve` alone: vLLM's names, with SGLang's as aliases."""

from pathlib import Path
from typing import Annotated, Any

import typer

from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.cli.flag_records import flag, record
from diffray.cluster.cli.flags import CHECKPOINT, Ranks
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.address import Server
from diffray.cluster.serve.deployment_options import Deployment, PlacementGroup
from diffray.cluster.serve.environment import API_KEY, OPERATOR_KEY
from diffray.components.checkpoints.demos import DEMOS

Replicas = Annotated[
    str,
    typer.Option(
        metavar="N|MIN:MAX",
        help="How many engines to run: N, or MIN:MAX to autoscale.",
        rich_help_panel="Replicas",
    ),
]
Positional = Annotated[
    list[str] | None,
    typer.Argument(
        help=f"{CHECKPOINT} Several share one endpoint.",
        metavar="MODEL",
        autocompletion=lambda: [*DEMOS],
    ),
]


@record("Model")
class Naming:
    model_path: str | None = flag(None, "--model", "--model-path", help="The same as the argument.")
    served_model_name: str | None = flag(help="The model's name in requests.")


@record("Layout", EngineConfig)
class Layout(Ranks):
    max_model_len: int | None = flag(None, "--max-model-len", "--context-length")
    max_num_seqs: int | None = flag(None, "--max-num-seqs", "--max-running-requests")
    max_queued_requests: int | None = flag()
    scheduling_policy: str | None = flag()
    kv_cache_memory: str | None = flag(metavar="SIZE")
    swap_space: str | None = flag(metavar="GIB|SIZE")
    prefix_cache_ttl: float | None = flag(metavar="SECONDS")
    steps_per_round: int | None = flag()
    draft_overhead: int | None = flag()
    cpu_threads: int | None = flag()


@record("Replicas", Deployment)
class Routing:
    prefix_routing: bool | None = flag()


@record("Replicas", PlacementGroup)
class Placement:
    strategy: str | None = flag(None, "--placement")


@record("Server", Server)
class Listening:
    host: str | None = flag()
    port: int | None = flag()
    dashboard: bool | None = flag()
    address: str | None = flag(rich_help_panel="Replicas")


@record("Server", ApiSettings)
class Api:
    api_keys: list[str] | None = flag(None, "--api-key", envvar=API_KEY)
    operator_keys: list[str] | None = flag(
        None, "--operator-key", "--admin-api-key", envvar=OPERATOR_KEY
    )
    cors_origins: list[str] | None = flag(None, "--allowed-origins")
    allowed_media_domains: list[str] | None = flag()
    ignore_unknown_fields: bool | None = flag()
    vllm_metric_names: bool | None = flag()
    page: bool | None = flag()


@record("Server")
class File:
    config: Path | None = flag(
        help="A YAML file that describes one or more models, instead of flags."
    )
    print_config: bool = flag(
        False, "--print-config", help="Print the configuration for `serve deploy` and exit."
    )


SET_BY_REPLICAS = ("num_replicas", "autoscaling_config")


def deployment(replicas: str) -> dict[str, Any]:
    """Return the options of a Serve deployment with N or MIN:MAX replicas."""
    low, colon, high = replicas.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()):
        raise ValueError(f"--replicas {replicas!r}: give N or MIN:MAX, such as 1:4")
    if not colon:
        return {} if int(low) == 1 else {"num_replicas": int(low)}
    return {"autoscaling_config": {"min_replicas": int(low), "max_replicas": int(high)}}
