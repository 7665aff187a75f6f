"""The flags that commands share, and the records of those that belong together."""

from typing import Annotated

import typer

from diffray.cluster.cli.flag_records import flag, record
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.environment import API_KEY
from diffray.components.checkpoints.demos import DEMOS
from diffray.workers.engine_options import EngineOptions

CHECKPOINT = f"A checkpoint's folder, a Hugging Face Hub id, or one of: {', '.join(DEMOS)}."
API_KEY_HELP = "The server's API key, if it requires one."

Checkpoint = Annotated[str, typer.Argument(help=CHECKPOINT)]
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


@record("Model", EngineOptions)
class Compute:
    dtype: str | None = flag()
    device: str | None = flag()
    kernels: str | None = flag()
    quantization: str | None = flag(None, "--quantization", "-q")
    cuda_graphs: bool | None = flag()
    bring_up: bool | None = flag()


@record("Model", EngineOptions)
class Engine(Compute):
    enable_prefix_caching: bool | None = flag()
    mask_token_id: int | None = flag()
    eos_token_id: list[int] | None = flag()


@record("Model", EngineOptions)
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
    seed: int | None = flag(help="The seed of sampling; default: another one each time.")
    stop: list[str] | None = flag(help="Stop before any of these texts; repeatable.")


@record("Diffusion")
class Diffusion:
    block_length: int | None = flag(help="Positions per block; default: the model's own.")
    decoder: str | None = flag(
        metavar="KIND",
        help="What makes tokens final: threshold, fixed, hierarchy, credit, factor, edit, "
        "schedule, origin, budget_threshold or entropy_bound.",
    )
    cache: str | None = flag(
        metavar="KIND", help="What a step computes: none, prefix, dual, vicinity or exact."
    )
    iteration: str | None = flag(
        metavar="KIND",
        help="How blocks are denoised: blockwise, first_token, block_diffusion or soft.",
    )
    settings: list[str] | None = flag(
        None,
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the decoder, cache or iteration, such as decoder.threshold=0.8, or "
        "another request parameter, such as min_tokens=8; repeatable.",
    )
