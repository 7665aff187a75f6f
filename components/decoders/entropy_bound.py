"""The entropy-bounded sampler (EB-Sampler): as many positions as are nearly independent."""

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from diffray.components.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal


class EntropyBound(Decoder):
    """Accept in the order of entropy, as long as those before have at most `gamma` nats together.

    Tokens that are accepted together are treated as independent. The error is bounded by the sum of
    their entropies without the largest, and the rule bounds this sum. The position with the least
    entropy always becomes final. Entropies are those of the distributions that tokens are drawn
    from.
    """

    measures: ClassVar[bool] = True

    kind: Literal["entropy_bound"] = "entropy_bound"
    gamma: float = Field(
        0.1, ge=0, description="The most entropy, in nats, of the tokens accepted before one."
    )

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        assert proposal.measures is not None
        # Positions where the model prefers the mask are never accepted together with others.
        entropy_BL = proposal.measures.entropy_BL.masked_fill(
            ~block.masked_BL | (proposal.confidence_BL < 0), math.inf
        )
        sorted_BL, order_BL = entropy_BL.sort(dim=-1, stable=True)
        before_BL = sorted_BL.cumsum(-1).roll(1, dims=-1)
        before_BL[:, 0] = 0
        passes_BL = (before_BL <= self.gamma) & sorted_BL.isfinite()
        return passes_BL.scatter(1, order_BL, passes_BL) & block.masked_BL
