"""Accept every masked position whose confidence reaches the threshold (Fast-dLLM, dInfer)."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from diffray.components.block import Block, Proposal
from diffray.components.decoder import Decoder

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
    """All positions at least this confident become final; if none is, the best does."""

    has_threshold: ClassVar[bool] = True

    kind: Literal["threshold"] = "threshold"
    threshold: float = Field(0.9, ge=0, le=1)

    def accept(self, proposal: Proposal, block: Block) -> Tensor:
        return accept_confident(
            proposal.confidence_BL, block.masked_BL, self.threshold, block.floor_B
        )
