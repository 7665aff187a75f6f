"""A decoder's decision on confidences written by hand."""

import torch
from torch import Tensor

from diffray.components.block import Block, Measures, Plan, Proposal
from diffray.components.decoder import Decoder

DECIDED = -1.0  # stands for a position that is not masked


def block_of(masked_BL: Tensor, share: int = 2, **given: Tensor) -> Block:
    rows, length = masked_BL.shape
    zero_B = torch.zeros(rows, dtype=torch.long)
    fields = {
        "ids_BL": torch.zeros(rows, length, dtype=torch.long),
        "masked_BL": masked_BL,
        "editable_BL": torch.zeros_like(masked_BL),
        "positions_BL": torch.arange(length).expand(rows, length),
        "seed_B": zero_B,
        "step_B": zero_B,
        "draw_step_B": zero_B,
        "step_in_block_B": zero_B,
        "length_B": zero_B + length,
        "index_B": zero_B,
        "count_B": zero_B + 1,
        "floor_B": torch.zeros(rows, dtype=torch.float64),
    }
    return Block(**{**fields, **given}, plans=(Plan(3, 3 + length, share),) * rows)


def proposal_of(confidence_BL: Tensor) -> Proposal:
    """Propose with these confidences, which say the other measures too: all are of one order."""
    ids_BL = torch.arange(confidence_BL.shape[1]).expand(confidence_BL.shape) + 10
    measures = Measures(confidence_BL, confidence_BL / 2, 1 - confidence_BL)
    return Proposal(ids_BL, confidence_BL, confidence_BL.clamp(min=1e-9).log(), measures=measures)


def accepted(decoder: Decoder, *confidences: float, share: int = 2, **given: Tensor) -> list[int]:
    row = torch.tensor([confidences], dtype=torch.float64)
    masked = row != DECIDED
    proposal = proposal_of(row.masked_fill(~masked, -torch.inf))
    mask = decoder.accept(proposal, block_of(masked, share, **given))
    assert mask.shape == row.shape
    return [i for i, taken in enumerate(mask[0].tolist()) if taken]
