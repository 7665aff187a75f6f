"""Credit decoding (dInfer): tokens that keep coming out on top are trusted earlier.

Letters: B rows, L positions, K token ids remembered per position.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from diffray.components.block import Block, Proposal
from diffray.components.decoder import Bonus, Decoder, Memory
from diffray.components.decoders.threshold import accept_confident
from diffray.kernels.acceptance import CONFIDENT, Rule

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class Credit(Decoder):
    """Adds alpha * ln(1 + credit) to the logits, then accepts by threshold.

    Each step the credit of all ids decays, and each masked position's top id gains
    probability ** gamma. An id that was never on top has no credit, so only the few ids that were
    need remembering: the vocabulary never appears, and the result is exact.
    """

    has_threshold: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    kind: Literal["credit"] = "credit"
    threshold: float = Field(
        0.9, ge=0, le=1, description="The confidence that makes a position final."
    )
    alpha: float = Field(0.7, ge=0, description="The weight of the credit in the logits.")
    gamma: float = Field(
        0.2, ge=0, description="The power of the probability that is added to the credit."
    )
    decay: float = Field(0.8, ge=0, le=1, description="What each step multiplies the credit by.")

    def remember(self, memory: Memory, block: Block, top_BL: Tensor, prob_BL: Tensor) -> Bonus:
        """Update the memory, in place, and return what to add to which logits."""
        memory.credit_BLK.mul_(self.decay)
        known_BLK = memory.ids_BLK == top_BL.unsqueeze(-1)
        free_BLK = memory.ids_BLK < 0
        # The first free place, where the id is new; a block takes at most K steps, so one is free.
        first_BLK = free_BLK & (free_BLK.cumsum(-1) == 1)
        place_BLK = torch.where(known_BLK.any(-1, keepdim=True), known_BLK, first_BLK)
        place_BLK &= block.masked_BL.unsqueeze(-1)
        memory.ids_BLK.copy_(torch.where(place_BLK, top_BL.unsqueeze(-1), memory.ids_BLK))
        memory.credit_BLK.add_(place_BLK * (prob_BL**self.gamma).unsqueeze(-1))
        return Bonus(memory.ids_BLK, self.alpha * torch.log1p(memory.credit_BLK))

    def accept(self, proposal: Proposal, block: Block) -> Tensor:
        return accept_confident(
            proposal.confidence_BL, block.masked_BL, self.threshold, block.floor_B
        )

    def rule(self, sequence: "Sequence") -> Rule | None:
        return Rule(CONFIDENT, self.threshold)
