"""Accept every masked position whose confidence reaches the threshold (Fast-dLLM, dInfer)."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from diffray.components.decoder import Decoder
from diffray.kernels.rules import CONFIDENT, SHARE, Rule

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal
    from diffray.components.sequence import Sequence


class Threshold(Decoder):
    """All positions at least this confident become final; if none is, the best does.

    With `steps_per_block` it is the rule of LLaDA2's `generate`, and SDAR's `dynamic`: a block of L
    positions takes at most that many steps, because each accepts at least L // steps positions (the
    first L % steps of them one more), and all that are above the threshold. Here equality is not
    enough, so a threshold of 1 is SDAR's `static`: it accepts only the shares.
    """

    has_threshold: ClassVar[bool] = True

    kind: Literal["threshold"] = "threshold"
    threshold: float = Field(
        0.9, ge=0, le=1, description="The confidence that makes a position final."
    )
    steps_per_block: int | None = Field(
        None,
        ge=1,
        description="The most steps for a block, as in LLaDA2 and SDAR; default: no limit.",
    )

    step_limit: int | None = Field(
        None, ge=1, description="The step of a block that accepts all its masks; default: none."
    )

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        if self.steps_per_block is None:
            found_BL = block.confident(proposal.confidence_BL, self.threshold)
        else:
            found_BL = block.above(proposal.confidence_BL, self.threshold, self.steps_per_block)
        if self.step_limit is None:
            return found_BL
        last_B = block.step_in_block_B + 1 >= self.step_limit
        return found_BL | block.masked_BL & last_B.unsqueeze(1)

    def rule(self, sequence: "Sequence") -> Rule | None:
        if self.step_limit is not None:
            return None
        if self.steps_per_block is None:
            return Rule(CONFIDENT, self.threshold)
        return Rule(SHARE, self.threshold, self.steps_per_block)
