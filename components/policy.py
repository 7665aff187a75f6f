"""The four parts as a request names them, and the check that they make sense for a model.

A new decoder or cache policy is one file and one name in a union here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from pydantic import Field

from diffray.components.cache import CachePolicy
from diffray.components.caches.dual import Dual
from diffray.components.caches.exact import Exact
from diffray.components.caches.none import NoCache
from diffray.components.caches.prefix import Prefix
from diffray.components.caches.vicinity import Vicinity
from diffray.components.config import InvalidField, PolicyPart
from diffray.components.decoder import Decoder
from diffray.components.decoders.budget_threshold import BudgetThreshold
from diffray.components.decoders.credit import Credit
from diffray.components.decoders.edit import Edit
from diffray.components.decoders.entropy_bound import EntropyBound
from diffray.components.decoders.factor import Factor
from diffray.components.decoders.fixed import Fixed
from diffray.components.decoders.hierarchy import Hierarchy
from diffray.components.decoders.origin import Origin
from diffray.components.decoders.schedule import Schedule
from diffray.components.decoders.threshold import Threshold
from diffray.components.iterations import BlockDiffusion, Blockwise, FirstToken, Iteration, Soft
from diffray.components.model import ModelSpec

AnyIteration = Annotated[
    Blockwise | FirstToken | BlockDiffusion | Soft, Field(discriminator="kind")
]
AnyDecoder = Annotated[
    Threshold
    | Fixed
    | Hierarchy
    | Credit
    | Factor
    | Edit
    | Schedule
    | Origin
    | BudgetThreshold
    | EntropyBound,
    Field(discriminator="kind"),
]
AnyCache = Annotated[NoCache | Prefix | Dual | Vicinity | Exact, Field(discriminator="kind")]

LONGEST_REMEMBERED = 512  # positions of a block; memory and time grow with the square and more


def _decoder(kind: str, name: str) -> str:
    return f'write diffusion: {{"decoder": {{"kind": "{kind}", "{name}": ...}}}}'


# The names of LLaDA's own `generate`, and those of its followers, where users try them first.
IN_DECODER: Final = {
    "steps": _decoder("fixed", "steps"),
    "threshold": _decoder("threshold", "threshold"),
    "remasking": _decoder("fixed", "remasking"),
    "gen_length": "write max_tokens",
}


class DiffusionParams(PolicyPart):
    """How a request is denoised; what is left out follows the server's default, then the model."""

    elsewhere: ClassVar[Mapping[str, str]] = IN_DECODER

    block_length: int | None = Field(
        None, ge=1, description="Positions per block; default: the model's own."
    )
    iteration: AnyIteration | None = Field(
        None,
        description="How blocks are denoised; default: block_diffusion for block-causal models, "
        "else blockwise.",
    )
    decoder: AnyDecoder = Field(Threshold(), description="What makes tokens final.")
    cache: AnyCache | None = Field(
        None,
        description="Which positions a step computes; default: exact for block-causal models, else "
        "dual.",
    )
    cfg_scale: float = Field(
        0.0, ge=0, description="Classifier-free guidance, as LLaDA's sampler defines it."
    )
    # These become final last: proposed, they have confidence 0, and the others' is computed as if
    # they could not be. With the ids of end tokens it is LLaDA's `confidence_eos_eot_inf`.
    zero_confidence_token_ids: tuple[int, ...] = Field(
        (), max_length=64, description="Token ids that become final last, such as end tokens."
    )

    def over(self, default: "DiffusionParams") -> "DiffusionParams":
        """Return these parameters, with what was not given taken from `default`."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return default.model_copy(update=given)


IN_DIFFUSION: Final = IN_DECODER | {
    name: f'write diffusion: {{"{name}": ...}}' for name in DiffusionParams.model_fields
}


@dataclass(frozen=True, slots=True)
class Policy:
    """The four parts of one request, checked against the model that will run it."""

    block_length: int
    iteration: Iteration
    decoder: Decoder
    cache: CachePolicy
    cfg_scale: float

    @staticmethod
    def resolve(params: DiffusionParams, spec: ModelSpec) -> "Policy":
        """Fill in what depends on the model; refuse with a reason what makes no sense for it."""
        causal = spec.block_causal
        iteration = params.iteration or (BlockDiffusion() if causal else Blockwise())
        cache = params.cache or (Exact() if causal else Dual())
        decoder = params.decoder
        length = params.block_length or spec.block_length
        plain = "block_diffusion" if causal else "blockwise"
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
        if decoder.remembers and length > LONGEST_REMEMBERED:
            raise InvalidField(
                f"block_length is {length}, and decoder {decoder.kind!r} takes blocks "
                f"of at most {LONGEST_REMEMBERED}: at each position it remembers as many ids as a "
                "block is long",
                "diffusion.block_length",
            )
        if iteration.soft and not decoder.has_threshold:
            raise InvalidField(
                f"iteration 'soft' lowers a threshold step by step, and decoder {decoder.kind!r} "
                "has none; use 'threshold', 'hierarchy', 'credit' or 'edit'",
                "diffusion.iteration",
            )
        if iteration.soft and params.cfg_scale > 0:
            raise InvalidField(
                f"cfg_scale does not go with iteration 'soft'; use {plain!r}", "diffusion.cfg_scale"
            )
        return Policy(length, iteration, decoder, cache, params.cfg_scale)
