"""Fast-dLLM's dynamic rule: the more positions are accepted together, the surer each must be."""

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from diffray.components.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal


class Factor(Decoder):
    """Accept the n most confident positions, n the largest with confidence_n >= 1 - factor/(n+1).

    At least one is accepted; if all masked positions but one are, the last one is too, as in
    Fast-dLLM's code.
    """

    kind: Literal["factor"] = "factor"
    factor: float = Field(
        1.0, gt=0, description="The larger, the more positions become final at a step."
    )

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        confidence_BL = proposal.confidence_BL.masked_fill(~block.masked_BL, -math.inf)
        sorted_BL, order_BL = confidence_BL.sort(dim=-1, descending=True, stable=True)
        n_L = order_BL.new_ones(order_BL.shape[1]).cumsum(0)
        # Confidences fall and the bound rises with n, so those that pass come before all others.
        passes_BL = sorted_BL >= 1 - self.factor / (n_L + 1)
        passes_BL[:, 0] = True
        all_but_one_B = passes_BL.sum(-1) >= block.masked_BL.sum(-1) - 1
        passes_BL |= all_but_one_B.unsqueeze(1)
        accepted_BL = passes_BL.scatter(1, order_BL, passes_BL)
        return block.masked_BL & accepted_BL
