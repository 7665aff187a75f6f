"""The flags that commands share, and records of related flags."""

from typing import Annotated, Any

import typer

from diffray.cluster.cli.flag_records import flag, record
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.environment import API_KEY
from diffray.components.checkpoints.demos import DEMOS
from diffray.workers.engine_options import EngineOptions

PACE = 5.0  # steps per second, as on the page
CHECKPOINT = f"A checkpoint's folder, a Hugging Face Hub id, or one of: {', '.join(DEMOS)}."
API_KEY_HELP = "The server's API key, if it requires one."

# Repeated here, because importing the modules that define them loads torch.
DECODERS = (
    *("threshold", "fixed", "hierarchy", "credit", "factor", "edit", "schedule", "origin"),
    *("budget_threshold", "entropy_bound", "sequential", "lopa", "whole_slots"),
)
CACHES = ("none", "prefix", "dual", "vicinity", "exact", "sub_block")
ITERATIONS = ("blockwise", "first_token", "block_diffusion", "sub_blocks", "soft", "renoise")


def _one_of(what: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the help and the completion of a flag that takes one of these kinds."""
    *others, last = kinds
    text = f"{what}: {', '.join(others)} or {last}."
    return {"metavar": "KIND", "help": text, "autocompletion": lambda: list(kinds)}


Checkpoint = Annotated[str, typer.Argument(help=CHECKPOINT, autocompletion=lambda: [*DEMOS])]
Prompt = Annotated[
    str | None,
    typer.Argument(help="The prompt; - reads it from stdin. The demo models have an example."),
]
Model = Annotated[
    str, typer.Option("--model", "-m", help=CHECKPOINT, metavar="MODEL", rich_help_panel="Model")
]
System = Annotated[str | None, typer.Option(help="The system message.", rich_help_panel="Request")]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="Do not apply the chat template.", rich_help_panel="Request"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@record("Engine", EngineOptions)
class Compute:
    dtype: str | None = flag()
    device: str | None = flag()
    kernels: str | None = flag()
    quantization: str | None = flag(None, "--quantization", "-q")
    kv_cache_dtype: str | None = flag()
    lora_modules: list[str] | None = flag(None, "--lora", "--lora-modules", metavar="NAME=PATH")
    cuda_graphs: bool | None = flag()
    bring_up: bool | None = flag()


@record("Engine", EngineOptions)
class Engine(Compute):
    received_weights: str | None = flag()
    enable_prefix_caching: bool | None = flag()
    first_step_caching: str | None = flag()
    mask_token_id: int | None = flag()
    eos_token_id: list[int] | None = flag()


@record("Engine", EngineOptions)
class BatchEngine(Engine):
    max_num_seqs: int | None = flag()


@record("Layout", EngineConfig)
class Ranks:
    tensor_parallel_size: int | None = flag(
        None, "--tensor-parallel-size", "--tp", "--tp-size", "-tp"
    )
    expert_parallel: bool | None = flag(
        None, "--enable-expert-parallel/--no-enable-expert-parallel", "--ep"
    )


@record("Server")
class Server:
    base_url: str = flag(
        "http://127.0.0.1:8000", metavar="URL", help="The server's URL, with or without /v1."
    )
    model: str | None = flag(
        None, "--model", "-m", help="The model's name on the server; default: the first."
    )
    api_key: str | None = flag(help=API_KEY_HELP, envvar=API_KEY)


@record("Output")
class Watching:
    watch: bool = flag(
        True, "--watch/--no-watch", help="Show how masks turn into text, step by step."
    )
    pace: float = flag(PACE, metavar="STEPS", help="Steps to show per second, at least 1.")


@record("Request")
class Sampling:
    temperature: float | None = flag(help="0 is greedy.")
    top_p: float | None = flag(
        help="Sample from the most probable tokens that add up to this probability."
    )
    top_k: int | None = flag(help="Sample from this many most probable tokens; 0 and -1: all.")


@record("Request")
class Answer(Sampling):
    max_tokens: int | None = flag(help="The most tokens to generate.")
    seed: int | None = flag(help="The seed of sampling; default: a new one each time.")
    stop: list[str] | None = flag(help="Stop before any of these texts; repeatable.")


@record("Diffusion")
class Diffusion:
    block_length: int | None = flag(
        help="Positions per block; default: the model's own, or all of a pinned canvas."
    )
    decoder: str | None = flag(**_one_of("What makes tokens final", DECODERS))
    cache: str | None = flag(**_one_of("What a step computes", CACHES))
    iteration: str | None = flag(**_one_of("How blocks are denoised", ITERATIONS))
    settings: list[str] | None = flag(
        None,
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the decoder, cache or iteration, such as decoder.threshold=0.8, or "
        "another request parameter, such as min_tokens=8; repeatable.",
    )
