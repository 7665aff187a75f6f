"""A fixed number of denoising steps, as in LLaDA's own sampler."""

from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import Tensor

from diffray.components.block import Block, Proposal
from diffray.components.decoder import Decoder
from diffray.kernels import noise
from diffray.kernels.acceptance import EVEN, Rule, highest

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class Fixed(Decoder):
    """Each step of a block accepts an equal share of its masks, earlier steps one more if needed.

    `steps` counts the whole generation and is spread evenly over its blocks. A step accepts the
    most confident positions, or with `remasking: random` positions drawn at random.
    """

    kind: Literal["fixed"] = "fixed"
    steps: int = Field(
        64, ge=1, description="Steps of the whole generation, spread evenly over its blocks."
    )
    remasking: Literal["low_confidence", "random"] = Field(
        "low_confidence", description="Accept the most confident positions, or random ones."
    )

    def accept(self, proposal: Proposal, block: Block) -> Tensor:
        steps_left_B = (block.steps_of(self.steps) - block.step_in_block_B).clamp(min=1)
        masks_B = block.masked_BL.sum(-1)
        accepted_B = (masks_B + steps_left_B - 1) // steps_left_B

        return block.masked_BL & highest(self._scores(proposal, block), accepted_B)

    def rule(self, sequence: "Sequence") -> Rule | None:
        if self.remasking == "random":
            return None
        before = self.steps * sequence.index // sequence.num_blocks
        after = self.steps * (sequence.index + 1) // sequence.num_blocks
        return Rule(EVEN, steps=max(after - before, 1))

    def _scores(self, proposal: Proposal, block: Block) -> Tensor:
        scores_BL = proposal.confidence_BL
        if self.remasking == "random":
            shape = block.positions_BL.shape
            seed_BL = block.seed_B.unsqueeze(1).expand(shape)
            step_BL = block.step_B.unsqueeze(1).expand(shape)
            scores_BL = noise.uniform(seed_BL, block.positions_BL, step_BL).to(scores_BL)
        return scores_BL.masked_fill(~block.masked_BL, -torch.inf)
