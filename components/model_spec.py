"""The facts about a model, without torch: the coordinator reads them too."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diffray.components.image import Sight


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
    block_length: int = 32  # of requests that name none; block-causal models are trained with one
    logit_shift: int = 0  # the logits about position p are those of the token at p - logit_shift
    family: str = ""  # its name for people
    encodes: bool = False  # a causal pass of its own, an encoder's, stores the K/V of what is final
    sight: Sight | None = None  # the images that it takes
    own_shapes: tuple[tuple[int, int], ...] = ()  # of each layer's keys, where they differ
    # Of requests that name none: what the model's authors recommend.
    decoder: Mapping[str, Any] = field(default_factory=lambda: {"kind": "threshold"})
    iteration: Mapping[str, Any] = field(default_factory=dict)
    # What generation_config.json calls the settings of these two, by its names.
    sampler: Mapping[str, str] = field(default_factory=dict)

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """The key heads of each layer on this rank, and their size."""
        return self.own_shapes or ((self.num_kv_heads, self.head_dim),) * self.num_layers
