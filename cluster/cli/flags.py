"""The flags that several commands share, and what is made of them: a request's body or parameters.

To make a field of a configuration model a flag, name it here or in the command: the model says the
rest. `typer.Option` has other names of the flag, if any.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer
from typer import Option

from diffray.cluster.cli.commands import Fields, Given
from diffray.cluster.control.engine_config import EngineConfig
from diffray.components.checkpoints.demos import NAMES
from diffray.components.config import UNIONS, kinds
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams
from diffray.workers.engine_options import EngineOptions

PACE = 5.0  # steps per second, as on the page
CHECKPOINT = (
    f"A checkpoint's folder, a GGUF file, a Hugging Face Hub id, or one of: {', '.join(NAMES)}."
)
API_KEY_HELP = "The server's API key, if it requires one."
DECODERS, CACHES, ITERATIONS = (
    tuple(kinds(DiffusionParams.model_fields[part].annotation))
    for part in ("decoder", "cache", "iteration")
)

Checkpoint = Annotated[str, typer.Argument(help=CHECKPOINT, autocompletion=lambda: [*NAMES])]
Model = Annotated[str, Option("--model", "-m", help=CHECKPOINT, metavar="MODEL")]
Pace = Annotated[float, Option(metavar="STEPS", help="Steps to show per second, at least 1.")]
Raw = Annotated[
    bool, Option("--raw", help="Do not apply the chat template.", rich_help_panel="Request")
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the decoder, cache or iteration, such as decoder.threshold=0.8, or "
        "another request parameter, such as min_tokens=8; repeatable.",
        rich_help_panel="Diffusion",
    ),
]

_NAMED = {
    "quantization": Option("--quantization", "-q"),
    "lora_modules": Option("--lora", "--lora-modules", metavar="NAME=PATH"),
}
_MEMORY = "dtype device kernels kv_cache_dtype cuda_graphs max_lora_rank".split()
_WEIGHTS = "received_weights", "mask_token_id", "eos_token_id"
_SHARING = "enable_prefix_caching", "first_step_caching"
Memory = Annotated[Given, Fields(EngineOptions, "Engine", *_MEMORY, **_NAMED)]
Compute = Annotated[Given, Fields(EngineOptions, "Engine", *_MEMORY, "bring_up", **_NAMED)]
Engine = Annotated[Compute, Fields(EngineOptions, "Engine", *_SHARING, *_WEIGHTS)]
BatchEngine = Annotated[Engine, Fields(EngineOptions, "Engine", "max_num_seqs")]
Ranks = Annotated[
    Given,
    Fields(
        EngineConfig,
        "Layout",
        tensor_parallel_size=Option("--tensor-parallel-size", "--tp", "--tp-size", "-tp"),
        expert_parallel=Option("--enable-expert-parallel/--no-enable-expert-parallel", "--ep"),
    ),
]
Sizes = Annotated[
    Ranks,
    Fields(
        EngineConfig,
        "Layout",
        max_model_len=Option("--max-model-len", "--context-length", "--context"),
        max_num_seqs=Option("--max-num-seqs", "--max-running-requests"),
        kv_cache_memory=Option(metavar="SIZE", parser=str),
    ),
]

_UNSET = Option(show_default=False)  # the server or the checkpoint may have another default
_SAMPLING = dict.fromkeys(("temperature", "top_p", "top_k"), _UNSET)
_ANSWER = dict.fromkeys(("max_tokens", "seed", "stop"), _UNSET)
_KINDS = dict.fromkeys(("decoder", "cache", "iteration"), Option(metavar="KIND"))
Sampling = Annotated[Given, Fields(SamplingParams, "Request", **_SAMPLING)]
Answer = Annotated[Sampling, Fields(SamplingParams, "Request", **_ANSWER)]
Diffusion = Annotated[Given, Fields(DiffusionParams, "Diffusion", "block_length", **_KINDS)]


DIFFUSION: Final = tuple(DiffusionParams.model_fields)  # the fields of `diffusion` in a request


def request_options(given: Given, settings: Iterable[str] | None) -> dict[str, Any]:
    """Return typed flags and settings as a body of a request; no field may be set twice."""
    body: dict[str, Any] = {}
    for name, value in given.items():
        if value is not None:
            _put(body, name, value)
    for setting in settings or ():
        put_setting(body, setting)
    return body


def put_setting(body: dict[str, Any], setting: str) -> None:
    """Store a setting such as `decoder.threshold=0.8` in a body."""
    name, equals, text = setting.partition("=")
    if not name or not equals:
        raise ValueError(f"expected NAME=VALUE, such as decoder.threshold=0.8 (given: {setting!r})")
    _put(body, name, _value(text))


def sampling_params(given: Given, settings: Iterable[str] | None) -> SamplingParams:
    """Return the same options as the sampling parameters of one answer."""
    options = request_options(given, settings)
    for part in UNIONS:
        _add_kind(options.get("diffusion", {}), part)
    params = SamplingParams(**options)
    if params.n != 1:
        raise ValueError(f"n is {params.n}, but the command line prints one answer; leave n out")
    return params


def _add_kind(diffusion: dict[str, Any], part: str) -> None:
    """Add the kind to a decoder given by settings alone: `threshold`; other parts must name it."""
    settings = diffusion.get(part)
    if not isinstance(settings, dict) or "kind" in settings:
        return
    if part != "decoder":
        first = next(iter(settings))
        raise ValueError(f"--set {part}.{first} needs --{part} KIND: the default is the model's")
    settings["kind"] = "threshold"


def _put(body: dict[str, Any], name: str, value: object) -> None:
    """Store a value at a dotted name, such as `decoder.threshold`; a part's string is its kind."""
    path = name.split(".")
    if name in UNIONS and isinstance(value, str):
        path.append("kind")
    if path[0] in DIFFUSION:
        path.insert(0, "diffusion")
    *folders, last = path
    inner: Any = body
    for folder in folders:
        inner = inner.setdefault(folder, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{name}: {folder!r} has no options of its own")
    if last in inner:
        raise ValueError(f"{name} is given twice")
    inner[last] = value


def _value(text: str) -> object:
    """Return the JSON value, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
