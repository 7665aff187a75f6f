"""The flags of `diffray serve` beside those of the model: vLLM's names, SGLang's as aliases."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from diffray.cluster.serve.environment import API_KEY
from diffray.components.checkpoints.demos import DEMOS

STRICT_PACK = "STRICT_PACK"
_MODEL, _SERVER, _LAYOUT, _REPLICAS = "Model", "Server", "Layout", "Replicas"


def _option(*names: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


Positional = Annotated[
    str | None,
    typer.Argument(
        help="A checkpoint's folder, a Hugging Face Hub id, or one of: " + ", ".join(DEMOS) + "."
    ),
]
ModelPath = Annotated[
    str | None, _option("--model", "--model-path", text="The same as the argument.", panel=_MODEL)
]
ServedName = Annotated[
    str | None, _option("--served-model-name", text="The model's name in requests.", panel=_MODEL)
]
ConfigFile = Annotated[
    Path | None,
    _option(
        "--config",
        text="A YAML file that describes one or more models, instead of flags.",
        panel=_SERVER,
    ),
]
PrintConfig = Annotated[
    bool,
    _option(
        "--print-config", text="Print the configuration for `serve deploy` and exit.", panel=_SERVER
    ),
]


@dataclass(frozen=True, slots=True)
class Layout:
    """How an engine is laid out over its ranks."""

    tp: Annotated[
        int,
        _option(
            "--tensor-parallel-size",
            "--tp",
            "--tp-size",
            "-tp",
            text="The number of ranks to split the model over.",
            panel=_LAYOUT,
        ),
    ] = 1
    ep: Annotated[
        bool,
        _option(
            "--enable-expert-parallel",
            "--ep",
            text="Give each rank whole experts instead of a slice of each.",
            panel=_LAYOUT,
        ),
    ] = False
    max_model_len: Annotated[
        int | None,
        _option(
            "--max-model-len",
            "--context-length",
            text="The most tokens of a prompt with its answer.",
            panel=_LAYOUT,
        ),
    ] = None
    max_num_seqs: Annotated[
        int,
        _option(
            "--max-num-seqs",
            "--max-running-requests",
            text="The most sequences to run at once, per replica.",
            panel=_LAYOUT,
        ),
    ] = 16
    max_queued_requests: Annotated[
        int,
        _option(
            "--max-queued-requests",
            text="The most requests to queue, per replica; more are refused with 429.",
            panel=_LAYOUT,
        ),
    ] = 256
    scheduling_policy: Annotated[
        str,
        _option(
            "--scheduling-policy",
            text="fcfs: first come, first served; priority: requests say their priority.",
            panel=_LAYOUT,
        ),
    ] = "fcfs"
    kv_cache_memory: Annotated[
        str | None,
        _option(
            "--kv-cache-memory",
            text="Memory for the KV cache on each rank, such as 4GiB.",
            panel=_LAYOUT,
            metavar="SIZE",
        ),
    ] = None
    steps_per_round: Annotated[
        int,
        _option(
            "--steps-per-round",
            text="The most denoising steps to run before looking at the result.",
            panel=_LAYOUT,
        ),
    ] = 1
    cpu_threads: Annotated[
        int | None, _option("--cpu-threads", text="Threads per rank on CPU.", panel=_LAYOUT)
    ] = None

    def typed(self) -> dict[str, Any]:
        """Return options of `EngineConfig`."""
        found = asdict(self)
        sizes = {"tensor_parallel_size": found.pop("tp"), "expert_parallel": found.pop("ep")}
        return sizes | found


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many engines there are, and where."""

    replicas: Annotated[
        str,
        _option(
            "--replicas",
            text="How many engines to run: N, or MIN:MAX to autoscale.",
            panel=_REPLICAS,
            metavar="N|MIN:MAX",
        ),
    ] = "1"
    strategy: Annotated[
        str,
        _option(
            "--placement",
            text="STRICT_PACK keeps a replica's ranks on one node; PACK lets them span nodes.",
            panel=_REPLICAS,
        ),
    ] = STRICT_PACK
    address: Annotated[
        str | None,
        _option(
            "--address",
            text="Join the Ray cluster at HOST:PORT (or auto) instead of starting one.",
            panel=_REPLICAS,
        ),
    ] = None

    def deployment(self) -> dict[str, Any]:
        """Return options of a Serve deployment."""
        low, colon, high = self.replicas.partition(":")
        if not low.isdecimal() or (colon and not high.isdecimal()):
            raise ValueError(f"--replicas {self.replicas!r}: give N or MIN:MAX, as 1:4")
        if not colon:
            return {} if int(low) == 1 else {"num_replicas": int(low)}
        return {"autoscaling_config": {"min_replicas": int(low), "max_replicas": int(high)}}


@dataclass(frozen=True, slots=True)
class Listening:
    """Where requests come in, and whose are answered."""

    host: Annotated[str, _option("--host", text="The address to listen on.", panel=_SERVER)] = (
        "127.0.0.1"
    )
    port: Annotated[int, _option("--port", text="The port to listen on.", panel=_SERVER)] = 8000
    api_key: Annotated[
        list[str] | None,
        _option(
            "--api-key",
            text="Requests must show one; repeatable. Those in the variable count as well.",
            panel=_SERVER,
            envvar=API_KEY,
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        _option(
            "--allowed-origins",
            text="Origins that browsers may send requests from, such as https://chat.example.com; "
            "repeatable.",
            panel=_SERVER,
        ),
    ] = None
    vllm_metric_names: Annotated[
        bool,
        _option(
            "--vllm-metric-names", text="Show every metric under vLLM's name too.", panel=_SERVER
        ),
    ] = False
    haproxy: Annotated[
        bool,
        _option(
            "--haproxy/--no-haproxy",
            text="Use Ray Serve's faster proxy, if installed.",
            panel=_SERVER,
        ),
    ] = True
    dashboard: Annotated[
        bool, _option("--dashboard", text="Start Ray's dashboard.", panel=_SERVER)
    ] = False

    def api(self, keys: list[str]) -> dict[str, Any]:
        """Return options of `ApiSettings`; `keys` are those of the environment too."""
        return {
            "api_keys": keys,
            "cors_origins": self.allowed_origins or [],
            "vllm_metric_names": self.vllm_metric_names,
        }
