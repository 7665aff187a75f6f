"""Dream's `origin`: positions become final in random order, each at its own time."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from diffray.components.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal


class Origin(Decoder):
    """Time goes from 1 to `eps` in equal steps; from t to s, a mask goes with probability 1 - s/t.

    A mask therefore remains at time s with probability s: one number is drawn for each position,
    and steps at which no position would become final are skipped. `steps` counts the whole
    canvas and is spread evenly over its blocks.
    """

    counts_canvas: ClassVar[bool] = True

    kind: Literal["origin"] = "origin"
    steps: int = Field(64, ge=1, description="Steps of the whole canvas.")
    eps: float = Field(1e-3, ge=0, le=1, description="The time at which the schedule ends.")

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        drawn_BL = block.drawn(block.step_B * 0)
        steps_B1 = block.steps_of(self.steps).clamp(min=1).unsqueeze(1)
        # The last step decides all that is left.
        step_BL = (1 - drawn_BL) / (1 - self.eps) * steps_B1 if self.eps < 1 else drawn_BL * 0
        step_BL = step_BL.ceil().minimum(steps_B1)
        next_B1 = step_BL.masked_fill(~block.masked_BL, float("inf")).amin(-1, keepdim=True)
        return block.masked_BL & (step_BL == next_B1)
