"""Accept every masked position whose confidence reaches the threshold (Fast-dLLM, dInfer)."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from diffray.components.block import Block, Proposal
from diffray.components.decoder import Decoder
from diffray.components.decoders.fixed import highest

_TIE = 1e-5  # positions this close to the row's best are accepted with it, as dInfer does


def accept_confident(
    confidence_BL: Tensor, masked_BL: Tensor, threshold: float, floor_B: Tensor
) -> Tensor:
    """Return the masked positions at or above the threshold, and always the row's best."""
    wanted_B = floor_B.clamp(min=threshold)
    best_B = confidence_BL.masked_fill(~masked_BL, -torch.inf).amax(-1)
    cut_B = torch.minimum(wanted_B, best_B - _TIE)
    return masked_BL & (confidence_BL >= cut_B.unsqueeze(1))


class Threshold(Decoder):
    """All positions at least this confident become final; if none is, the best does.

    With `steps_per_block` it is the rule of LLaDA2's `generate`: a block of L positions takes at
    most so many steps, because each step accepts at least L / steps positions (the first L % steps
    of them one more), and all that are above the threshold. There equality is not enough.
    """

    has_threshold: ClassVar[bool] = True

    kind: Literal["threshold"] = "threshold"
    threshold: float = Field(
        0.9, ge=0, le=1, description="The confidence that makes a position final."
    )
    steps_per_block: int | None = Field(
        None,
        ge=1,
        description="The most steps for a block, as in LLaDA2's generate; default: no limit.",
    )

    def accept(self, proposal: Proposal, block: Block) -> Tensor:
        confidence_BL, masked_BL = proposal.confidence_BL, block.masked_BL
        if self.steps_per_block is None:
            return accept_confident(confidence_BL, masked_BL, self.threshold, block.floor_B)
        wanted_B1 = block.floor_B.clamp(min=self.threshold).unsqueeze(1)
        share_B = block.length_B // self.steps_per_block
        share_B += block.step_in_block_B < block.length_B % self.steps_per_block
        scores_BL = confidence_BL.masked_fill(~masked_BL, -torch.inf)
        return masked_BL & ((confidence_BL > wanted_B1) | highest(scores_BL, share_B))
