"""Credit decoding (dInfer): tokens that keep coming out on top are trusted earlier."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from diffray.components.decoder import Decoder
from diffray.kernels.rules import CONFIDENT, Gain, Rule

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal
    from diffray.components.sequence import Sequence


class Credit(Decoder):
    """Adds alpha * ln(1 + credit) to the logits, then accepts by threshold.

    Each step the credit of all ids decays, and each masked position's top id gains
    probability ** gamma. `kernels/credit.py` computes that.
    """

    has_threshold: ClassVar[bool] = True

    kind: Literal["credit"] = "credit"
    threshold: float = Field(
        0.9, ge=0, le=1, description="The confidence that makes a position final."
    )
    alpha: float = Field(0.7, ge=0, description="The weight of the credit in the logits.")
    gamma: float = Field(
        0.2, ge=0, description="The power of the probability that is added to the credit."
    )
    decay: float = Field(0.8, ge=0, le=1, description="What each step multiplies the credit by.")

    def gain(self) -> Gain:
        return Gain(self.alpha, self.gamma, self.decay)

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        return block.confident(proposal.confidence_BL, self.threshold)

    def rule(self, sequence: "Sequence") -> Rule | None:
        return Rule(CONFIDENT, self.threshold)
