"""The interface of a model.

Letters: T packed tokens, R rows of the head, H hidden size, V this rank's vocabulary slice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from diffray.components.batch import Batch
from diffray.components.image import Sight
from diffray.components.kv_pool import KVPool
from diffray.kernels.confidence import Confidence, Draw


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


class Model(Protocol):
    """A denoiser: the logits of token i belong to position i, or to i + 1 if shifted."""

    @property
    def spec(self) -> ModelSpec: ...

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return the input embeddings [T, H]."""
        ...

    def look(self, pixels_PC: Tensor, columns: int) -> Tensor:
        """Return the soft tokens [S, H] of an image, if it takes any."""
        ...

    def soften(self, x_TH: Tensor, soft_TH: Tensor, batch: Batch) -> Tensor:
        """Return the embeddings with what is expected at masked positions."""
        ...

    def forward(self, x_TH: Tensor, batch: Batch, kv: KVPool) -> Tensor:
        """Run the layers and the last norm; stores the windows' K/V in place."""
        ...

    def head(self, hidden_RH: Tensor) -> Tensor:
        """Return this rank's slice of the logits [R, V]; no other rank's is ever built."""
        ...

    def confidence(
        self,
        hidden_RH: Tensor,
        mask_token_id: int,
        draw: Draw | None,
        known_RK: Tensor | None = None,
    ) -> Confidence:
        """Return each row's choice among this rank's ids, never the mask, without storing logits.

        It also gathers the logits of the mask and of the known ids; -1 is not an id.
        """
        ...

    def expected_embedding(self, weights_RV: Tensor) -> Tensor:
        """Return sum over the whole vocabulary of weight * input embedding [R, H]."""
        ...
