"""A pinned canvas's own rule: slots become final as a whole, in few forwards."""

from typing import TYPE_CHECKING, ClassVar, Final, Literal

from pydantic import Field

from diffray.components.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal

_MOST_STEPS: Final = 2  # of an answer, or one for each of its blocks if it has more


class WholeSlots(Decoder):
    """The first step accepts values at least as probable as the threshold, the last step all.

    It is the default decoder of a pinned canvas.
    """

    whole_slots: ClassVar[bool] = True

    kind: Literal["whole_slots"] = "whole_slots"
    threshold: float = Field(
        0.5,
        ge=0,
        le=1,
        description="The probability at which the first forward decides a value; 0: it decides "
        "them all.",
    )

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        assert proposal.value_BL is not None, "there are no slots"
        # Each block after this one takes at least one step.
        last_B = block.step_B + block.count_B - block.index_B >= _MOST_STEPS
        return block.masked_BL & (last_B.unsqueeze(1) | (proposal.value_BL >= self.threshold))
