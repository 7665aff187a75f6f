"""Fast-dLLM's rule for Dream without a cache: a threshold, under a budget that grows."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from diffray.components.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal


class BudgetThreshold(Decoder):
    """Of the most confident masks, those at or above the threshold become final.

    After n steps, at most n of `steps` equal parts of the block may be final: the next step may
    use what one step leaves. The most confident mask always becomes final, so a block may take
    more steps. `steps` counts the whole canvas and is spread evenly over its blocks.
    """

    counts_canvas: ClassVar[bool] = True

    kind: Literal["budget_threshold"] = "budget_threshold"
    steps: int = Field(64, ge=1, description="Steps of the whole canvas.")
    threshold: float = Field(0.9, ge=0, le=1, description="The least confidence to accept.")

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        confidence_BL = proposal.confidence_BL
        steps_B = block.steps_of(self.steps).clamp(min=1)
        done_B = (block.step_in_block_B + 1).minimum(steps_B)
        final_B = block.length_B - block.masked_BL.sum(-1)
        allowed_B = block.length_B * done_B // steps_B - final_B
        sure_BL = block.best(confidence_BL, allowed_B) & (confidence_BL >= self.threshold)
        return sure_BL | block.best(confidence_BL, allowed_B.new_ones(len(allowed_B)))
