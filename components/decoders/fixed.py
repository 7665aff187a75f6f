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

    `steps` counts the whole canvas and is spread evenly over its blocks. With `half_even`, as in
    A2D, blocks have equally many, a share is the nearest integer, and steps of none are skipped.
    """

    counts_canvas: ClassVar[bool] = True

    kind: Literal["fixed"] = "fixed"
    steps: int = Field(64, ge=1, description="Steps of the whole canvas, spread over its blocks.")
    remasking: Literal["low_confidence", "random"] = Field(
        "low_confidence", description="Accept the most confident positions, or random ones."
    )
    rounding: Literal["first_more", "half_even"] = Field(
        "first_more", description="A step's share: rounded up, or to the nearest, halves to even."
    )

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        masks_B = block.masked_BL.sum(-1)
        steps_left_B = (block.steps_of(self.steps) - block.step_in_block_B).clamp(min=1)
        accepted_B = (masks_B + steps_left_B - 1) // steps_left_B
        if self.rounding == "half_even":
            accepted_B = masks_B.new_tensor([plan.share for plan in block.plans])
        is_random = self.remasking == "random"
        scores_BL = block.drawn(block.step_B) if is_random else proposal.confidence_BL
        return block.best(scores_BL.to(proposal.confidence_BL), accepted_B)

    def shares(self, sequence: "Sequence") -> tuple[int, ...]:
        if self.rounding == "first_more":
            return ()
        from diffray.kernels.step_shares import half_even_shares  # with torch: options do without

        blocks = sequence.canvas.place_of(sequence.block.index)[1]
        masks = sequence.block.length - sequence.block.num_prompt
        return half_even_shares(-(-self.steps // blocks), masks)

    def rule(self, sequence: "Sequence") -> Rule | None:
        if self.remasking == "random" or self.rounding == "half_even":
            return None
        index, count = sequence.canvas.place_of(sequence.block.index)
        before, after = (self.steps * at // count for at in (index, index + 1))
        return Rule(EVEN, steps=max(after - before, 1))
