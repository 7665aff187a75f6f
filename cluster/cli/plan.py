"""`diffray plan`: whether a model fits a GPU, with how many requests at once, and how fast."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Option

from diffray.cluster.cli import flags
from diffray.cluster.cli.checkpoint_commands import in_units
from diffray.cluster.cli.commands import refuse
from diffray.cluster.control.engine_config import EngineConfig
from diffray.components.cards import CARDS, TAKEN, Card, named_card
from diffray.components.memory_size import in_bytes

if TYPE_CHECKING:
    from diffray.workers.plan import Plan, Share

_SMALLER: Final = ("int8", "int4")  # the formats to try where a model does not fit
_FEWEST: Final = 128  # tokens of the shortest context to try
_ESTIMATE: Final = "(an estimate)"
_UNCONFIRMED: Final = (
    "No GPU has confirmed this plan. Times are the least that the GPU's published bandwidth and "
    "rate allow; steps on an H200 took 1.3 to 2.4 times as long."
)
_LIMITS: Final = {
    "max_num_seqs": "as many as --max-num-seqs allows; there is room for {most:,}",
    "kv_cache": "as many as the K/V cache holds",
    "activations": "as many as may run everything in one step; choose --max-num-seqs {most:,}",
}

Gpu = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help=f"The GPU of each rank: {', '.join(CARDS)}. Default: this machine's device.",
        autocompletion=lambda: [*CARDS],
    ),
]
GpuMemory = Annotated[
    str | None, Option(metavar="SIZE", help="The GPU's memory, such as 80GiB, if it has no name.")
]
PerForward = Annotated[
    float,
    Option(
        metavar="N",
        min=0.01,
        help="Tokens that a step decides for a request, as `diffray generate --stats` shows them; "
        "tokens/s depend on it.",
    ),
]


def plan(
    context: typer.Context,
    model: flags.Checkpoint,
    *,
    gpu: Gpu = None,
    gpu_memory: GpuMemory = None,
    tokens_per_forward: PerForward = 1.0,
    sizes: flags.Sizes,
    engine: flags.Memory,
    as_json: flags.Json = False,
) -> None:
    """Predict how a model fits a GPU: memory, requests at once, speed.

    It reads no weights. The exit status is 1 if no request of the whole context fits.
    """
    config = EngineConfig(**sizes, **engine)
    if config.device == "cpu":
        refuse(context, "with --device cpu", ("gpu", "gpu_memory"))
    card = _card(gpu, gpu_memory, config)
    found = _share(model, config, card).plan(tokens_per_forward)
    fix = "" if found.requests else _fix(model, config, card, found)
    if as_json:
        typer.echo(json.dumps(asdict(found) | {"fix": fix}, indent=2))
    else:
        ending = f"To fix: {fix}." if fix else _UNCONFIRMED if card.device == "cuda" else ""
        typer.echo("\n".join([*_lines(found), "", ending]).rstrip())
    if fix:
        raise typer.Exit(1)


def _card(gpu: str | None, memory: str | None, config: EngineConfig) -> Card:
    """Return the GPU that is named, or this machine's device."""
    if memory is None and gpu is None:
        from diffray.components.backend import choose_device
        from diffray.workers.plan import card_here

        return card_here(choose_device(config.device))
    card, size = named_card(gpu) if gpu else Card("a GPU", 0, TAKEN), in_bytes(memory)
    return card if size is None else card._replace(memory=size)


def _share(model: str, config: EngineConfig, card: Card) -> "Share":
    from diffray.components.mesh import Mesh
    from diffray.workers.plan import Share

    # Where the ranks' shares differ, the last one's is the largest.
    ranks = config.tensor_parallel_size
    return Share.of(
        model, config.rank_options, Mesh(ranks - 1, ranks, config.expert_parallel), card
    )


def _fix(model: str, config: EngineConfig, card: Card, found: "Plan") -> str:
    """Say why no request fits, and which changes would make room for one."""
    from diffray.components.checkpoints.folder import read_config, resolve
    from diffray.components.models.registry import rank_counts

    def fits(name: str, value: Any) -> bool:
        try:
            share = _share(model, config.model_copy(update={name: value}), card)
        except ValueError:  # such as rows that a format does not divide
            return False
        return share.requests(share.setup.max_num_seqs) > 0

    counts = rank_counts(read_config(resolve(model)), expert_parallel=config.expert_parallel)
    more = [each for each in counts if each > found.ranks and card.device == "cuda"]
    halves = [found.context >> power for power in range(1, found.context.bit_length())]
    tried: list[tuple[str, str, Sequence[Any]]] = [
        ("--max-num-seqs", "max_num_seqs", [found.most_requests or found.max_num_seqs]),
        ("--tp", "tensor_parallel_size", more),
        ("--quantization", "quantization", () if found.quantization else _SMALLER),
        ("--context", "max_model_len", [each for each in halves if each >= _FEWEST]),
    ]
    ways = [
        f"{flag} {value}"
        for flag, name, values in tried
        if (value := next((each for each in values if fits(name, each)), None)) is not None
    ]
    if config.kv_cache_memory and fits("kv_cache_memory", None):
        ways.insert(0, "another --kv-cache-memory")
    *others, last = ways or ["a device with more memory"]
    choice = f"{', '.join(others)} or {last}" if others else last
    step = in_units(found.activations // found.max_num_seqs)
    given = config.kv_cache_memory
    room = f"the {in_units(given)} of --kv-cache-memory" if given else "half of what is left"
    return (
        f"{found.family} does not fit: of the {in_units(found.memory)} of {found.device}, weights "
        f"take {in_units(found.weights)}, and a request of {found.context:,} tokens "
        f"{in_units(found.kv_bytes_per_request)} of K/V, which get {room}"
        + (f", and {step} of activations" if found.activations else "")
        + f"; choose {choice}"
    )


def _lines(found: "Plan") -> Iterator[str]:
    """Yield what people read, in two columns."""
    each = f", for each of {found.ranks} ranks" if found.ranks > 1 else ""
    pages = f"pages of {found.page_size} tokens: {found.num_pages:,}"
    taken = in_units(found.activations)
    how = (found.quantization or found.dtype).replace("'s own", "'s own formats")
    why = _LIMITS[found.limit].format(most=found.most_requests)
    rows = {
        "device": f"{found.device}{each}",
        "memory": in_units(found.memory),
        "CUDA and NCCL": f"{in_units(found.taken)} {_ESTIMATE}" if found.taken else "",
        "weights": f"{in_units(found.weights)} in {how}",
        "canvases": in_units(found.canvases),
        "CUDA graphs": f"{in_units(found.graphs)} {_ESTIMATE}" if found.graphs else "",
        "K/V cache": f"{in_units(found.kv_cache)}, {pages}" if found.requests else "",
        "adapters": in_units(found.adapters) if found.adapters else "",
        "left": in_units(found.left) if found.requests else "",
        "activations": f"up to {taken} {_ESTIMATE}" if found.activations else "",
        "K/V of a token": in_units(found.kv_bytes_per_token),
        "K/V of a request": f"{in_units(found.kv_bytes_per_request)}, {found.context:,} tokens",
        "requests at once": f"{found.requests:,}, {why}" if found.requests else "none",
    }
    per_forward = f"if a step decides {found.tokens_per_forward:g} for each request"
    for step in found.steps:
        speed = f"{step.ms:.3g} ms, {step.tokens_per_s:,.0f} tokens/s {per_forward}"
        rows[f"step of {step.requests:,}"] = speed
    width = max(map(len, rows))
    yield from (f"{name:<{width}}  {text}" for name, text in rows.items() if text)
