"""Rows that share a decoder, and what the decoders that remember add to their rows' logits.

Letters: R rows of the head, B rows of a round, G of them with the same decoder, L positions of a
block, K remembered ids.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.block import Block
from diffray.components.decoder import Decoder, Memory
from diffray.kernels.confidence import Confidence


@dataclass(frozen=True, slots=True)
class DecoderGroup:
    """The rows of a round that share a decoder."""

    decoder: Decoder
    members: list[int]  # the rows, on the host
    rows_G: Tensor
    memory: Memory | None


class Reward(NamedTuple):
    """What is added to the logits of the remembered ids of each head row; -1 is no id."""

    ids_RK: Tensor
    values_RK: Tensor


def recall(groups: Items[DecoderGroup], cells_R: Tensor, block: Block) -> Tensor | None:
    """Return the ids that are remembered of each head row; None where no decoder remembers."""
    found = [(group.rows_G, group.memory.ids_BLK) for group in groups if group.memory is not None]
    return _at(found, cells_R, block, -1) if found else None


def reward(
    groups: Items[DecoderGroup], cells_R: Tensor, block: Block, top_ids_R: Tensor, logprob_R: Tensor
) -> Reward:
    """Tell decoders what is on top of their rows, and return what they add for what they know."""
    top_BL = block.ids_BL.flatten().scatter(0, cells_R, top_ids_R).view_as(block.ids_BL)
    prob_BL = logprob_R.new_zeros(block.ids_BL.shape)
    prob_BL.view(-1)[cells_R] = logprob_R.exp()
    ids, values = [], []
    for group in groups:
        if group.memory is not None:
            own = block, top_BL, prob_BL
            if len(groups) > 1:  # else there are no rows to select
                rows_G = group.rows_G
                own = block.rows(rows_G, group.members), top_BL[rows_G], prob_BL[rows_G]
            bonus = group.decoder.remember(group.memory, *own)
            ids.append((group.rows_G, bonus.ids_BLK))
            values.append((group.rows_G, bonus.values_BLK))
    ids_RK = _at(ids, cells_R, block, -1)
    return Reward(ids_RK, _at(values, cells_R, block, 0).masked_fill_(ids_RK < 0, 0))


def rewarded(
    found: Confidence,
    known_RK: Tensor,
    groups: Items[DecoderGroup],
    cells_R: Tensor,
    block: Block,
    mask_token_id: int,
) -> Confidence:
    """Return what would have been found, had decoders added to the logits; no row draws.

    Gathered are the mask's logit and those of the ids that were known. Only known ids gain, so no
    other logits are needed: the best is the best of before or one of them.
    """
    mask_R, lse_R, logits_RK = found.gathered_RK[:, 0], found.logsumexp_R, found.gathered_RK[:, 1:]
    top_R = torch.maximum(found.best_R, mask_R)
    # Of equals the lowest id is on top.
    is_mask_R = (mask_R > found.best_R) | ((mask_R == top_R) & (mask_token_id < found.ids_R))
    top_ids_R = found.ids_R.masked_fill(is_mask_R, mask_token_id)
    ids_RK, values_RK = reward(groups, cells_R, block, top_ids_R, top_R - lse_R)
    # What has only become known now is what is on top.
    logits_RK = logits_RK.where(ids_RK == known_RK, top_R.unsqueeze(1))
    logits_RK = logits_RK.masked_fill(ids_RK < 0, -torch.inf).to(values_RK)
    raised_RK = logits_RK + values_RK
    lse_R = _exchanged(lse_R, logits_RK, raised_RK).to(lse_R)

    raised_RK = raised_RK.to(top_R)
    is_mask_RK = ids_RK == mask_token_id
    mask_R = torch.maximum(mask_R, raised_RK.masked_fill(~is_mask_RK, -torch.inf).amax(1))
    others_RK = raised_RK.masked_fill(is_mask_RK, -torch.inf)
    rivals_RK = torch.cat([found.best_R.unsqueeze(1), others_RK], dim=1)
    best_R = rivals_RK.amax(1)
    rival_ids_RK = torch.cat([found.ids_R.unsqueeze(1), ids_RK], dim=1)
    lost_RK = rivals_RK < best_R.unsqueeze(1)
    winner_R = rival_ids_RK.masked_fill(lost_RK, torch.iinfo(torch.long).max).amin(1)
    return Confidence(winner_R, best_R, best_R, best_R, lse_R, mask_R.unsqueeze(1))


def _exchanged(lse_R: Tensor, before_RK: Tensor, after_RK: Tensor) -> Tensor:
    """Return the log-sum-exp with some logits in the place of others."""
    peak_R1 = torch.maximum(lse_R.to(after_RK), after_RK.amax(1)).unsqueeze(1)
    gain_R = ((after_RK - peak_R1).exp() - (before_RK - peak_R1).exp()).sum(1)
    return peak_R1.squeeze(1) + ((lse_R - peak_R1.squeeze(1)).exp() + gain_R).log()


def _at(parts: Items[tuple[Tensor, Tensor]], cells_R: Tensor, block: Block, other: int) -> Tensor:
    """Return the head rows of what groups say of their rows; `other` for rows of other groups."""
    _, first_GLK = parts[0]
    if len(first_GLK) == len(block.ids_BL):  # of all rows, in their order
        return first_GLK.flatten(0, 1)[cells_R]
    all_BLK = first_GLK.new_full((len(block.ids_BL), *first_GLK.shape[1:]), other)
    for rows_G, part_GLK in parts:
        all_BLK[rows_G] = part_GLK
    return all_BLK.flatten(0, 1)[cells_R]
