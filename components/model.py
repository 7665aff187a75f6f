"""The interface of a model.

Letters: T packed tokens, R rows of the head, H hidden size, V this rank's vocabulary slice.
"""

from typing import Protocol

from torch import Tensor

from diffray.components.batch import Batch
from diffray.components.kv_pool import KVPool
from diffray.components.model_spec import ModelSpec
from diffray.kernels.confidence import Confidence, Draw


class Model(Protocol):
    """A denoiser: the logits of token i belong to position i, or to i + 1 if shifted."""

    @property
    def spec(self) -> ModelSpec: ...

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return the input embeddings [T, H]."""
        ...

    def look(self, pixels_PC: Tensor, columns: int) -> Tensor:
        """Return the soft tokens [S, H] of an image, if the model takes images."""
        ...

    def soften(self, x_TH: Tensor, soft_TH: Tensor, batch: Batch) -> Tensor:
        """Return the embeddings, combined with the expected ones at masked positions."""
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
