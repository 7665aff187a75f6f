"""Acceptance by a threshold of confidence, which several decoders share.

Letters: B rows, L positions of a block.
"""

import torch
from torch import Tensor

from diffray.components.block import Block
from diffray.kernels.acceptance import TIE, highest


def accept_confident(
    confidence_BL: Tensor, masked_BL: Tensor, threshold: float, floor_B: Tensor
) -> Tensor:
    """Return the masked positions at or above the threshold, and always the row's best."""
    wanted_B = floor_B.clamp(min=threshold)
    best_B = confidence_BL.masked_fill(~masked_BL, -torch.inf).amax(-1)
    cut_B = torch.minimum(wanted_B, best_B - TIE)
    return masked_BL & (confidence_BL >= cut_B.unsqueeze(1))


def accept_share(
    confidence_BL: Tensor, block: Block, threshold: float, steps: int | None
) -> Tensor:
    """Return the masks strictly above the threshold, or the step's share of the block if more.

    The share is an equal part of the block for each of `steps`, or one position if that is None.
    """
    wanted_B1 = block.floor_B.clamp(min=threshold).unsqueeze(1)
    share_B = torch.ones_like(block.length_B) if steps is None else block.share(steps)
    scores_BL = confidence_BL.masked_fill(~block.masked_BL, -torch.inf)
    return block.masked_BL & ((confidence_BL > wanted_B1) | highest(scores_BL, share_B))
