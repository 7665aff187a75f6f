"""The four parts as a request names them, and the check that they fit a model.

A new decoder or cache policy is one file and one name in a union here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Annotated, ClassVar, Final, Literal, get_args

from pydantic import Field, TypeAdapter

from diffray.components.cache import CachePolicy
from diffray.components.caches.dual import Dual
from diffray.components.caches.exact import Exact
from diffray.components.caches.none import NoCache
from diffray.components.caches.prefix import Prefix
from diffray.components.caches.sub_block import SubBlock
from diffray.components.caches.vicinity import Vicinity
from diffray.components.compatibility import (
    Asked,
    check_canvas,
    check_model,
    check_pairs,
    check_together,
    grown_by,
)
from diffray.components.config import InvalidField, OrKind, PolicyPart
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
from diffray.components.decoders.sequential import Sequential
from diffray.components.decoders.threshold import Threshold
from diffray.components.decoders.whole_slots import WholeSlots
from diffray.components.iterations import (
    Autoregressive,
    BlockDiffusion,
    Blockwise,
    FirstToken,
    Introspective,
    Iteration,
    Renoise,
    SelfSpeculation,
    Soft,
    SubBlocks,
    attends_otherwise,
    decides_otherwise,
)
from diffray.components.model_spec import ModelSpec
from diffray.components.speculation import Verify

AnyIteration = Annotated[
    Blockwise
    | FirstToken
    | BlockDiffusion
    | SubBlocks
    | Soft
    | Renoise
    | Autoregressive
    | SelfSpeculation
    | Introspective,
    Field(discriminator="kind"),
    OrKind(),
]
_ITERATION: Final[TypeAdapter[Iteration]] = TypeAdapter(AnyIteration)
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
    | EntropyBound
    | Sequential
    | WholeSlots,
    Field(discriminator="kind"),
    OrKind(),
]
_DECODER: Final[TypeAdapter[Decoder]] = TypeAdapter(AnyDecoder)
AnyCache = Annotated[
    NoCache | Prefix | Dual | Vicinity | Exact | SubBlock, Field(discriminator="kind"), OrKind()
]

_SLOT_LENGTH: Final = 8


def _decoder(kind: str, name: str) -> str:
    return f'write diffusion: {{"decoder": {{"kind": "{kind}", "{name}": ...}}}}'


# Names of LLaDA's own `generate` and of its followers, which users try here first.
IN_DECODER: Final = {
    "steps": _decoder("fixed", "steps"),
    "threshold": _decoder("threshold", "threshold"),
    "remasking": _decoder("fixed", "remasking"),
    "denoising_steps": _decoder("threshold", "steps_per_block"),
    "gen_length": 'write max_tokens and diffusion: {"canvas": "fixed"}',
}


class DiffusionParams(PolicyPart):
    """How a request is denoised; omitted fields follow the server's default, then the model."""

    elsewhere: ClassVar[Mapping[str, str]] = IN_DECODER

    block_length: int | None = Field(
        None,
        ge=1,
        description="Positions per block; default: the model's own, or all of a pinned canvas.",
    )
    iteration: AnyIteration | None = Field(
        None,
        description="How blocks are denoised; default: the family's, such as blockwise or "
        "block_diffusion.",
    )
    decoder: AnyDecoder | None = Field(
        None,
        description="What makes tokens final; default: what the model's authors recommend, or "
        "threshold.",
    )
    cache: AnyCache | None = Field(
        None,
        description="Which positions a step computes; default: exact for block-causal models, else "
        "dual.",
    )
    canvas: Literal["growing", "fixed", "pinned"] | None = Field(
        None,
        description="growing: a bidirectional model sees canvas_length masks, and as many again "
        "when these are denoised without an end token, so an answer does not depend on "
        "max_tokens. fixed: it sees max_tokens masks from the start, as in the originals; so it "
        "is before a suffix. pinned: the literals of a JSON schema stand on the canvas from the "
        "start, and only its fields are denoised. Default: growing, or fixed with a decoder whose "
        "steps are those of the whole canvas.",
    )
    canvas_length: int | None = Field(
        None,
        ge=1,
        description="The masks of a growing canvas, rounded up to whole blocks; default: what the "
        "model's authors use.",
    )
    slot_length: int | None = Field(
        None,
        ge=1,
        le=256,
        description="The most tokens of a field of a pinned canvas, except choices; default: 8.",
    )
    cfg_scale: float = Field(
        0.0, ge=0, description="Classifier-free guidance, as LLaDA's sampler defines it."
    )
    speculation: Annotated[Verify, OrKind()] | None = Field(
        None,
        description="Run several denoising steps in one forward where they can be predicted; "
        "tokens stay the same. Default: off.",
    )
    # These become final last: their proposals have confidence 0, and the confidence of others is
    # computed as if these were forbidden. With end tokens, it is LLaDA's `confidence_eos_eot_inf`.
    zero_confidence_token_ids: tuple[int, ...] = Field(
        (), max_length=64, description="Token ids that become final last, such as end tokens."
    )

    @property
    def slots(self) -> int | None:
        """The length of the longest slots of a pinned canvas; None if it is not pinned."""
        return (self.slot_length or _SLOT_LENGTH) if self.canvas == "pinned" else None

    def over(self, default: "DiffusionParams") -> "DiffusionParams":
        """Return these parameters, with omitted ones taken from `default`.

        A default decoder of pinned canvases is for those alone, and so are a canvas and its length
        for each other.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if self.canvas in ("fixed", "pinned"):
            given.setdefault("canvas_length", None)
        if self.canvas_length is not None:
            given.setdefault("canvas", None)
        if decides_otherwise(self.iteration, default.iteration):
            given = _NEXT_TOKEN | given
        elif attends_otherwise(self.iteration, default.iteration):
            given.setdefault("cache", None)
        found = default.model_copy(update=given)
        if "decoder" in given or found.decoder is None or found.canvas == "pinned":
            return found
        return found.model_copy(update={"decoder": None}) if found.decoder.whole_slots else found


# What says how to denoise, and nothing to an iteration that writes token by token, or the reverse.
_NEXT_TOKEN: Final = {
    **dict.fromkeys(("block_length", "decoder", "speculation"), None),
    **dict.fromkeys(("canvas", "canvas_length", "slot_length"), None),
    **{"cfg_scale": 0.0, "zero_confidence_token_ids": ()},
}

IN_DIFFUSION: Final = IN_DECODER | {
    name: f'write diffusion: {{"{name}": ...}}' for name in DiffusionParams.model_fields
}


@dataclass(frozen=True, slots=True)
class Policy:
    """The four parts of one request, checked against the model that will run it."""

    block_length: int  # positions that are denoised together
    causal_length: int  # final positions that see each other; 0: all of the canvas
    iteration: Iteration
    decoder: Decoder
    cache: CachePolicy
    cfg_scale: float
    speculation: Verify | None = None
    canvas_length: int = 0  # of a growing canvas; 0: it is as long as the answer may be
    fixed: bool = False  # whether that was asked for
    encodes: bool = False  # a separate pass stores the K/V of final tokens
    # If above 0, that pass is bidirectional within a piece: a block, or so many positions of the
    # prompt, counted from its end.
    pieces: int = 0

    @property
    def shares_prefixes(self) -> bool:
        """Whether the K/V of final tokens depend only on those before them, and can be shared."""
        return self.cache.keeps_prefix and not self.pieces and self.cfg_scale == 0

    @staticmethod
    def resolve(
        params: DiffusionParams, spec: ModelSpec, pinned: int = 0, *, suffix: bool = False
    ) -> "Policy":
        """Fill in the model's defaults; refuse parts that do not fit the model, with a reason.

        A pinned canvas of `pinned` positions up to its last slot is one block, whatever the
        attention. A canvas with a suffix does not grow.
        """
        decoder = params.decoder or _default_decoder(params, spec)
        iteration = params.iteration or _default_iteration(params, decoder, spec)
        encodes = spec.encodes and iteration.kind != "autoregressive"
        length = params.block_length or iteration.length(spec.block_length)
        pieces = _pieces(iteration, spec, length)
        causal = spec.block_causal or pieces > 0
        cache = params.cache or (Exact() if causal else Dual())
        causal_length = 0
        if causal:
            causal_length = 1 if (encodes or iteration.next_token) and not pieces else length
        if pinned and params.block_length is None:
            length = pinned + max(causal_length - 1, 0)  # it may start in a block of attention
        check_model(iteration, decoder, cache, spec, causal=causal)
        check_canvas(params, iteration, decoder, spec.iterations[0])
        check_together(iteration, decoder, cache, length)
        policy = Policy(
            length,
            causal_length,
            iteration,
            decoder,
            cache,
            params.cfg_scale,
            params.speculation,
            0 if suffix else grown_by(params, decoder, spec, causal=causal),
            fixed=params.canvas == "fixed" and (pieces > 0 or not causal),
            encodes=encodes or pieces > 0,
            pieces=pieces,
        )
        check_pairs(Asked(policy))
        return policy

    def options(self) -> dict[str, object]:
        """Return the policy as a request would name it."""
        parts = {"iteration": self.iteration, "decoder": self.decoder, "cache": self.cache}
        about: dict[str, object] = {"block_length": self.block_length}
        if self.canvas_length:
            about["canvas_length"] = self.canvas_length
        if self.fixed:
            about["canvas"] = "fixed"
        return about | {name: part.model_dump(exclude_none=True) for name, part in parts.items()}


def accepted_by(spec: ModelSpec, *, masked: bool = True) -> dict[str, list[str] | bool]:
    """Return which parts of a policy fit a model, and whether suffixes and images do.

    Where no mask token is known, no iteration that needs one does.
    """
    caches: tuple[type[CachePolicy], ...] = get_args(get_args(AnyCache)[0])
    causal = spec.block_causal or "block_diffusion" in spec.iterations
    fits = [
        ((causal and each.block_causal) or (not spec.block_causal and each.bidirectional))
        and (not each.follows_masks or "sub_blocks" in spec.iterations)
        for each in caches
    ]
    decoders: tuple[type[Decoder], ...] = get_args(get_args(AnyDecoder)[0])
    if set(spec.iterations) <= {"autoregressive", "introspective"}:
        decoders = (Sequential,)
    elif {*spec.iterations} == {"renoise"}:
        decoders = (EntropyBound,)
    return {
        "decoder": [each.model_fields["kind"].default for each in decoders],
        "iteration": [k for k in spec.iterations if masked or k != "introspective"],
        "cache": [each.model_fields["kind"].default for each in compress(caches, fits)],
        "suffix": not spec.block_causal,
        "images": spec.sight is not None,
    }


def _pieces(iteration: Iteration, spec: ModelSpec, length: int) -> int:
    """Return the longest piece of a prompt that is encoded both ways; 0 if none is."""
    if not isinstance(iteration, BlockDiffusion):
        return 0
    if iteration.context is not None and not spec.encodes:
        raise InvalidField(
            f"iteration.context {iteration.context!r} does not fit this model, which encodes final "
            "tokens in one way alone; leave it out",
            "diffusion.iteration",
        )
    if iteration.context == "bidirectional":
        return spec.max_positions
    return 0 if spec.block_causal else length


def _default_decoder(params: DiffusionParams, spec: ModelSpec) -> Decoder:
    has_sub_blocks = params.iteration is not None and params.iteration.sub_block()
    if params.canvas == "pinned" and not has_sub_blocks:
        return WholeSlots()
    if isinstance(params.iteration, Autoregressive | Introspective):
        return Sequential()
    if isinstance(params.iteration, SelfSpeculation):
        return Threshold(step_limit=1)
    return _DECODER.validate_python(spec.decoder)


def _default_iteration(params: DiffusionParams, decoder: Decoder, spec: ModelSpec) -> Iteration:
    fits = decoder.has_threshold and params.canvas != "pinned"
    wanted = spec.logit_shift or (params.cache is not None and params.cache.follows_masks)
    if wanted and fits and "sub_blocks" in spec.iterations:
        return SubBlocks()
    own = {} if params.canvas == "pinned" else spec.iteration
    return _ITERATION.validate_python({"kind": spec.iterations[0], **own})
