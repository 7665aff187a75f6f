"""LLaDA2.1's joint threshold: masks become tokens, and tokens already written may be replaced."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from diffray.components.block import Block, Proposal
from diffray.components.decoder import Decoder


class Edit(Decoder):
    """Mask-to-token above `threshold`, token-to-token above `edit_threshold`, both strict.

    At least one mask is filled per step. When no mask is left, up to `max_post_edit_steps` more
    steps may edit, though never more than the block has positions (or 32); the block ends with the
    first that changes nothing.
    """

    edits: ClassVar[bool] = True
    has_threshold: ClassVar[bool] = True

    kind: Literal["edit"] = "edit"
    threshold: float = Field(
        0.5, ge=0, le=1, description="The confidence above which a mask becomes a token."
    )
    edit_threshold: float = Field(
        0.0, ge=0, le=1, description="The confidence above which a token becomes another."
    )
    max_post_edit_steps: int = Field(
        16, ge=0, description="The most steps that edit once no mask is left."
    )

    def accept(self, proposal: Proposal, block: Block) -> Tensor:
        confidence_BL = proposal.confidence_BL
        wanted_B1 = block.floor_B.clamp(min=self.threshold).unsqueeze(1)
        filled_BL = block.masked_BL & (confidence_BL > wanted_B1)
        best_B1 = confidence_BL.masked_fill(~block.masked_BL, -2).amax(-1, keepdim=True)
        none_B1 = ~filled_BL.any(-1, keepdim=True)
        filled_BL |= none_B1 & block.masked_BL & (confidence_BL == best_B1)
        edited_BL = (
            block.editable_BL
            & (confidence_BL > self.edit_threshold)
            & (proposal.ids_BL != block.ids_BL)
        )
        return filled_BL | edited_BL

    def settle_steps(self) -> int:
        return self.max_post_edit_steps
