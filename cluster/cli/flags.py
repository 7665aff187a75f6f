"""The flags that several commands share.

To make a field of a configuration model a flag, name it here or in the command: the model says the
rest. `typer.Option` has other names of the flag, if any.
"""

from typing import Annotated

import typer
from typer import Option

from diffray.cluster.cli.model_flags import Fields, Given
from diffray.cluster.control.engine_config import EngineConfig
from diffray.components.checkpoints.demos import DEMOS
from diffray.components.config import kinds
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams
from diffray.workers.engine_options import EngineOptions

PACE = 5.0  # steps per second, as on the page
CHECKPOINT = f"A checkpoint's folder, a Hugging Face Hub id, or one of: {', '.join(DEMOS)}."
API_KEY_HELP = "The server's API key, if it requires one."
DECODERS, CACHES, ITERATIONS = (
    tuple(kinds(DiffusionParams.model_fields[part].annotation))
    for part in ("decoder", "cache", "iteration")
)

Checkpoint = Annotated[str, typer.Argument(help=CHECKPOINT, autocompletion=lambda: [*DEMOS])]
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
_COMPUTE = "dtype", "device", "kernels", "kv_cache_dtype", "cuda_graphs", "bring_up"
_WEIGHTS = "received_weights", "mask_token_id", "eos_token_id"
_SHARING = "enable_prefix_caching", "first_step_caching"
Compute = Annotated[Given, Fields(EngineOptions, "Engine", *_COMPUTE, **_NAMED)]
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

_UNSET = Option(show_default=False)  # the server or the checkpoint may have another default
_SAMPLING = dict.fromkeys(("temperature", "top_p", "top_k"), _UNSET)
_ANSWER = dict.fromkeys(("max_tokens", "seed", "stop"), _UNSET)
_KINDS = dict.fromkeys(("decoder", "cache", "iteration"), Option(metavar="KIND"))
Sampling = Annotated[Given, Fields(SamplingParams, "Request", **_SAMPLING)]
Answer = Annotated[Sampling, Fields(SamplingParams, "Request", **_ANSWER)]
Diffusion = Annotated[Given, Fields(DiffusionParams, "Diffusion", "block_length", **_KINDS)]
