"""Which parts of a policy go together, and with a model's attention."""

from typing import TYPE_CHECKING, Final

from diffray.components.cache import CachePolicy
from diffray.components.config import InvalidField
from diffray.components.decoder import Decoder
from diffray.components.iterations import Iteration
from diffray.components.model_spec import ModelSpec

if TYPE_CHECKING:
    from diffray.components.policy import DiffusionParams

LONGEST_REMEMBERED: Final = 512  # positions of a block; memory and time grow with its square


def grown_by(params: "DiffusionParams", decoder: Decoder, spec: ModelSpec) -> int:
    """Return the masks of a growing canvas; 0 if it does not grow."""
    if params.canvas_length is None:
        by_default = params.canvas is None and not decoder.counts_canvas
        return spec.canvas_length if params.canvas == "growing" or by_default else 0
    if spec.block_causal:
        raise InvalidField(
            "canvas_length does not fit this model: its attention is block-causal, so a block "
            "never sees those after it; leave it out",
            "diffusion.canvas_length",
        )
    if params.canvas in ("fixed", "pinned"):
        raise InvalidField(
            f"canvas_length is about a growing canvas, and this one is {params.canvas!r}; leave "
            "one of them out",
            "diffusion.canvas_length",
        )
    return params.canvas_length


def check_attention(iteration: Iteration, cache: CachePolicy, *, causal: bool) -> None:
    """Refuse parts that do not fit the model's attention."""
    if not (iteration.block_causal if causal else iteration.bidirectional):
        raise InvalidField(
            f"iteration {iteration.kind!r} does not fit this model: its attention is "
            + (
                "block-causal; use 'block_diffusion'"
                if causal
                else "bidirectional; use 'blockwise'"
            ),
            "diffusion.iteration",
        )
    if not (cache.block_causal if causal else cache.bidirectional):
        raise InvalidField(
            f"cache {cache.kind!r} does not fit this model: "
            + (
                "its attention is block-causal, so finished blocks never change; "
                "use 'exact' or 'none'"
                if causal
                else "its attention is bidirectional, so no K/V is ever exact; "
                "use 'dual', 'vicinity', 'prefix' or 'none'"
            ),
            "diffusion.cache",
        )


def check_together(iteration: Iteration, decoder: Decoder, cache: CachePolicy, length: int) -> None:
    """Refuse parts of a policy that do not go together."""
    if decoder.gain() is not None and length > LONGEST_REMEMBERED:
        raise InvalidField(
            f"block_length is {length}, and decoder {decoder.kind!r} takes blocks "
            f"of at most {LONGEST_REMEMBERED}: at each position it remembers as many ids as a "
            "block is long",
            "diffusion.block_length",
        )
    floored = iteration.soft and not iteration.renoises
    if (floored or iteration.sub_block()) and not decoder.has_threshold:
        raise InvalidField(
            f"iteration {iteration.kind!r} takes a decoder with a threshold, and "
            f"{decoder.kind!r} has none; use 'threshold', 'hierarchy', 'credit' or 'edit'",
            "diffusion.iteration",
        )
    if cache.follows_masks and not iteration.sub_block():
        raise InvalidField(
            f"cache {cache.kind!r} does not go with iteration {iteration.kind!r}, which has no "
            "sub-blocks; use 'exact'",
            "diffusion.cache",
        )


def check_pinned(iteration: Iteration, decoder: Decoder, plain: str) -> None:
    """Refuse parts that cannot denoise a canvas whose unused positions are removed."""
    if iteration.renoises:
        raise InvalidField(
            f"canvas 'pinned' does not go with iteration {iteration.kind!r}; leave it out",
            "diffusion.canvas",
        )
    if iteration.soft or iteration.first_alone:
        raise InvalidField(
            f"canvas 'pinned' goes with iteration {plain!r} alone; use that",
            "diffusion.iteration",
        )
    if decoder.edits:
        raise InvalidField(
            f"decoder {decoder.kind!r} replaces tokens, and those of a pinned canvas stay; use "
            "another",
            "diffusion.decoder",
        )
