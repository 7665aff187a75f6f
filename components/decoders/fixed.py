"""A fixed number of denoising steps, as in LLaDA's own sampler."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from diffray.components.decoder import Decoder
from diffray.kernels.rules import EVEN, Rule

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal
    from diffray.components.sequence import Sequence


class Fixed(Decoder):
    """Each step of a block accepts an equal share of its masks, earlier steps one more if needed.

    `steps` counts the whole canvas and is spread evenly over its blocks. A step accepts the
    most confident positions, or with `remasking: random` positions drawn at random.
    """

    counts_canvas: ClassVar[bool] = True

    kind: Literal["fixed"] = "fixed"
    steps: int = Field(
        64, ge=1, description="Steps of the whole canvas, spread evenly over its blocks."
    )
    remasking: Literal["low_confidence", "random"] = Field(
        "low_confidence", description="Accept the most confident positions, or random ones."
    )

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        steps_left_B = (block.steps_of(self.steps) - block.step_in_block_B).clamp(min=1)
        masks_B = block.masked_BL.sum(-1)
        accepted_B = (masks_B + steps_left_B - 1) // steps_left_B
        is_random = self.remasking == "random"
        scores_BL = block.drawn(block.step_B) if is_random else proposal.confidence_BL
        return block.best(scores_BL.to(proposal.confidence_BL), accepted_B)

    def rule(self, sequence: "Sequence") -> Rule | None:
        if self.remasking == "random":
            return None
        index, count = sequence.canvas.place_of(sequence.block.index)
        before, after = (self.steps * at // count for at in (index, index + 1))
        return Rule(EVEN, steps=max(after - before, 1))
