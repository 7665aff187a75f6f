"""Lookahead parallel decoding (LoPA, arXiv 2512.16229): several next canvases in one forward."""

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from diffray.components.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal


class Lopa(Decoder):
    """Accept tokens above the threshold, or the best; the next forward tries branches of that.

    A branch adds one of the next most confident tokens. The canvas or branch on which the model is
    surest of the remaining masks becomes the row, and the step continues with the model's proposals
    for it. Without room for branches, only the first rule applies.
    """

    has_threshold: ClassVar[bool] = True

    kind: Literal["lopa"] = "lopa"
    threshold: float = Field(
        0.9, ge=0, le=1, description="The confidence above which every position becomes final."
    )
    branches: int = Field(
        4, ge=1, le=16, description="The most branches that a forward tries beside the canvas."
    )

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        return block.above(proposal.confidence_BL, self.threshold)

    def lookahead(self) -> int:
        return self.branches


def branch_confidence(proposal: "Proposal", masked_BL: "Tensor") -> "Tensor":
    """Return the mean confidence at each row's masks; -inf if one is unknown, or none is left.

    A position where the model prefers the mask counts as 0.
    """
    unknown_B = (masked_BL & (proposal.confidence_BL == -math.inf)).any(-1)
    sum_B = proposal.confidence_BL.clamp(min=0).masked_fill(~masked_BL, 0.0).sum(-1)
    mean_B = sum_B / masked_BL.sum(-1)
    return mean_B.masked_fill(unknown_B | mean_B.isnan(), -math.inf)


def next_best(proposal: "Proposal", masked_BL: "Tensor") -> tuple["Tensor", "Tensor"]:
    """Return the positions of each row in the order of branches, and how many can have a branch.

    No branch adds a token without confidence.
    """
    open_BL = masked_BL & (proposal.confidence_BL > 0)
    scores_BL = proposal.confidence_BL.masked_fill(~open_BL, -math.inf)
    return scores_BL.argsort(dim=-1, descending=True, stable=True), open_BL.sum(-1)
