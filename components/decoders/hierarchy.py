"""Divide and conquer (dInfer's hierarchical decoding): an anchor for each run of masks."""

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from diffray.components.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal


class Hierarchy(Decoder):
    """The best position of each run of masks, if above `low_threshold`, and all above `threshold`.

    Both comparisons are strict; the best position of the row is always accepted.
    """

    has_threshold: ClassVar[bool] = True

    kind: Literal["hierarchy"] = "hierarchy"
    threshold: float = Field(
        0.92, ge=0, le=1, description="The confidence above which every position becomes final."
    )
    low_threshold: float = Field(
        0.62,
        ge=0,
        le=1,
        description="The confidence above which the best position of a run of masks does.",
    )

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        masked_BL = block.masked_BL
        confidence_BL = proposal.confidence_BL.masked_fill(~masked_BL, -math.inf)
        wanted_B1 = block.floor_B.clamp(min=self.threshold).unsqueeze(1)
        anchor_BL = (confidence_BL == _best_of_run(confidence_BL, masked_BL)) & (
            confidence_BL > self.low_threshold
        )
        best_BL = confidence_BL == confidence_BL.amax(-1, keepdim=True)
        return masked_BL & (anchor_BL | (confidence_BL > wanted_B1) | best_BL)


def _best_of_run(confidence_BL: "Tensor", masked_BL: "Tensor") -> "Tensor":
    """Return, at each masked position, the highest confidence of its run of masked positions."""
    starts_BL = masked_BL.clone()
    starts_BL[:, 1:] &= ~masked_BL[:, :-1]
    run_BL = starts_BL.cumsum(-1)  # 0 before the first run; a gap keeps its left run's number
    rows, length = confidence_BL.shape
    best = confidence_BL.new_full((rows, length + 1), -math.inf)
    best.scatter_reduce_(1, run_BL, confidence_BL, "amax")
    return best.gather(1, run_BL)
