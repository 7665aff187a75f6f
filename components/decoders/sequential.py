"""SDAR's `sequential` remasking: each block is written from left to right."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from diffray.components.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal


class Sequential(Decoder):
    """Accept the leftmost masks, one at each step, or a share with `steps_per_block`.

    With it, a block of L positions takes at most that many steps: each accepts L // steps
    positions, and the first L % steps one more.
    """

    kind: Literal["sequential"] = "sequential"
    steps_per_block: int | None = Field(
        None, ge=1, description="The most steps for a block; default: one for each position."
    )

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        number_BL = block.masked_BL.cumsum(-1)  # of each mask in its row, from 1 on
        if self.steps_per_block is None:
            return block.masked_BL & (number_BL <= 1)
        return block.masked_BL & (number_BL <= block.share(self.steps_per_block).unsqueeze(1))
