"""Accept every masked position whose confidence reaches the threshold (Fast-dLLM, dInfer)."""

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from diffray.components.block import Block, Proposal
from diffray.components.decoder import Decoder
from diffray.kernels.acceptance import CONFIDENT, SHARE, TIE, Rule, highest

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


def accept_confident(
    confidence_BL: Tensor, masked_BL: Tensor, threshold: float, floor_B: Tensor
) -> Tensor:
    """Return the masked positions at or above the threshold, and always the row's best."""
    wanted_B = floor_B.clamp(min=threshold)
    best_B = confidence_BL.masked_fill(~masked_BL, -torch.inf).amax(-1)
    cut_B = torch.minimum(wanted_B, best_B - TIE)
    return masked_BL & (confidence_BL >= cut_B.unsqueeze(1))


def accept_share(
    confidence_BL: Tensor, block: Block, threshold: float, steps: int | None
) -> Tensor:
    """Return the masks strictly above the threshold, or the step's share of the block if more.

    That is an equal part of the block for each of so many steps; one position without a number.
    """
    wanted_B1 = block.floor_B.clamp(min=threshold).unsqueeze(1)
    share_B = torch.ones_like(block.length_B) if steps is None else block.share(steps)
    scores_BL = confidence_BL.masked_fill(~block.masked_BL, -torch.inf)
    return block.masked_BL & ((confidence_BL > wanted_B1) | highest(scores_BL, share_B))


class Threshold(Decoder):
    """All positions at least this confident become final; if none is, the best does.

    With `steps_per_block` it is the rule of LLaDA2's `generate`, and SDAR's `dynamic`: a block of L
    positions takes at most so many steps, because each step accepts at least L / steps positions
    (the first L % steps of them one more), and all that are above the threshold. There equality is
    not enough, so a threshold of 1 is SDAR's `static`: it accepts the shares alone.
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

    def accept(self, proposal: Proposal, block: Block) -> Tensor:
        confidence_BL, masked_BL = proposal.confidence_BL, block.masked_BL
        if self.steps_per_block is None:
            return accept_confident(confidence_BL, masked_BL, self.threshold, block.floor_B)
        return accept_share(confidence_BL, block, self.threshold, self.steps_per_block)

    def rule(self, sequence: "Sequence") -> Rule:
        if self.steps_per_block is None:
            return Rule(CONFIDENT, self.threshold)
        return Rule(SHARE, self.threshold, self.steps_per_block)
