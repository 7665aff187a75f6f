"""What the commands' flags are: their types, what help says about them, and which go together."""

from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

import typer

from diffray.cluster.cli.flag_records import Flag, Options
from diffray.components.checkpoints.demos import DEMOS
from diffray.workers.engine_options import EngineOptions

_REQUEST, _DIFFUSION, _MODEL, _OUTPUT = "Request", "Diffusion", "Model", "Output"
CHECKPOINT = f"A checkpoint's folder, a Hugging Face Hub id, or one of: {', '.join(DEMOS)}."

Checkpoint = Annotated[str, typer.Argument(help=CHECKPOINT)]
Prompt = Annotated[
    str | None,
    typer.Argument(help="The prompt; - reads it from stdin. The demo models have an example."),
]

Model = Annotated[
    str, typer.Option("--model", "-m", help=CHECKPOINT, rich_help_panel=_MODEL, metavar="MODEL")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="The most tokens to generate.", rich_help_panel=_REQUEST)
]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=_REQUEST)]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the most probable tokens that add up to this probability.",
        rich_help_panel=_REQUEST,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Sample from this many most probable tokens; 0 and -1: all.", rich_help_panel=_REQUEST
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="The seed of sampling; default: another one each time.", rich_help_panel=_REQUEST
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Stop before any of these texts; repeatable.", rich_help_panel=_REQUEST),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Do not apply the chat template.", rich_help_panel=_REQUEST)
]

BlockLength = Annotated[
    int | None,
    typer.Option(help="Positions per block; default: the model's own.", rich_help_panel=_DIFFUSION),
]
Decoder = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="What makes tokens final: threshold, fixed, hierarchy, credit, factor, edit, "
        "schedule, origin, budget_threshold or entropy_bound.",
        rich_help_panel=_DIFFUSION,
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="What a step computes: none, prefix, dual, vicinity or exact.",
        rich_help_panel=_DIFFUSION,
    ),
]
Iteration = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="How blocks are denoised: blockwise, first_token, block_diffusion or soft.",
        rich_help_panel=_DIFFUSION,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the decoder, cache or iteration, such as decoder.threshold=0.8, or "
        "another request parameter, such as min_tokens=8; repeatable.",
        rich_help_panel=_DIFFUSION,
    ),
]

Watch = Annotated[
    bool, typer.Option("--watch", help="Show the masks turn into text.", rich_help_panel=_OUTPUT)
]
Stats = Annotated[
    bool,
    typer.Option(
        "--stats",
        help="Print tokens, forwards and tokens/s on stderr.",
        rich_help_panel=_OUTPUT,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Engine(Options):
    """What a model runs on; what it does not say the checkpoint does."""

    model = EngineOptions
    panel = _MODEL
    flags: ClassVar = {
        "dtype": Flag(),
        "device": Flag(),
        "kernels": Flag(),
        "quantization": Flag(("--quantization", "-q")),
        "cuda_graphs": Flag(),
        "bring_up": Flag(),
        "enable_prefix_caching": Flag(),
        "mask_token_id": Flag(),
        "eos_token_id": Flag(),
    }


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None


@dataclass(frozen=True, slots=True)
class Diffusion:
    """How a canvas is denoised."""

    block_length: BlockLength = None
    decoder: Decoder = None
    cache: Cache = None
    iteration: Iteration = None
    settings: Settings = None

    def typed(self) -> dict[str, object]:
        """Return what was typed, but the settings, under a request's names."""
        return {
            "block_length": self.block_length,
            "decoder.kind": self.decoder,
            "cache.kind": self.cache,
            "iteration.kind": self.iteration,
        }


def typed_request(sampling: Sampling, diffusion: Diffusion, **others: object) -> dict[str, object]:
    """Return what was typed of a request, but the settings, under its names."""
    return {**others, **asdict(sampling), **diffusion.typed()}
