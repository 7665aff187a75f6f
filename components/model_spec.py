"""The facts about a model, without torch: the coordinator reads them too."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from diffray.components.image import Sight

THRESHOLD: Final[Mapping[str, Any]] = {"kind": "threshold"}


class Denoising(NamedTuple):
    """How a family denoises, and what its authors recommend; `ModelSpec` explains the fields."""

    block_causal: bool
    block_length: int = 32
    logit_shift: int = 0
    canvas_length: int = 128  # of bidirectional models
    decoder: Mapping[str, Any] = THRESHOLD
    sampler: Mapping[str, str] = {}
    iterations: tuple[str, ...] = ()
    masked: bool | None = True
    encodes: bool = False
    next_token: bool = False
    iteration: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts about a model that planning needs, for this rank."""

    num_layers: int
    num_kv_heads: int  # on this rank
    head_dim: int
    hidden_size: int
    vocab_size: int  # of the whole model
    vocab_start: int  # the start of this rank's slice
    max_positions: int
    block_causal: bool
    block_length: int = 32  # the default of requests; block-causal models are trained with one
    canvas_length: int = 0  # the default of growing canvases; 0: its blocks never see later ones
    logit_shift: int = 0  # the logits about position p are those of the token at p - logit_shift
    family: str = ""  # its display name
    encodes: bool = False  # a separate causal pass, an encoder's, stores the K/V of final tokens
    next_token: bool = False  # rows of causal passes are about the next position
    masked: bool | None = True  # it has a mask token; None: only adapters may have one
    own_iterations: tuple[str, ...] = ()  # that it runs, the default first; or else the usual ones
    sight: Sight | None = None  # the images that it takes
    own_shapes: tuple[tuple[int, int], ...] = ()  # of each layer's keys, where they differ
    # The defaults of requests, as the model's authors recommend.
    decoder: Mapping[str, Any] = field(default_factory=lambda: THRESHOLD)
    iteration: Mapping[str, Any] = field(default_factory=dict)
    # Maps the names in generation_config.json to settings of these two.
    sampler: Mapping[str, str] = field(default_factory=dict)

    def context(self, length: int | None) -> int:
        """Return `length`, or by default the longest context; refuse a longer one."""
        length = length or self.max_positions
        if length > self.max_positions:
            made_for = f"what the model was made for ({self.max_positions})"
            raise ValueError(f"max_model_len ({length}) exceeds {made_for}")
        return length

    @property
    def first_shift(self) -> int:
        """The shift of a block's first position where that is decided alone."""
        return 1 if self.next_token else self.logit_shift

    @property
    def iterations(self) -> tuple[str, ...]:
        """The kinds of iteration that it runs; the first is the plain one."""
        if self.own_iterations:
            return self.own_iterations
        if self.block_causal:
            return "block_diffusion", "sub_blocks", "soft"
        return "blockwise", "first_token", "soft"

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """The key heads of each layer on this rank, and their size."""
        return self.own_shapes or ((self.num_kv_heads, self.head_dim),) * self.num_layers
