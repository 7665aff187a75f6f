"""Branches on the device: which canvas of a sequence is the most promising, and the next ones.

Letters: B rows of sequences and copies, L positions of the longest block, G sequences that have
branches, K canvases of each, N branches of all.
"""

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.components.backend import send
from diffray.components.block import Block, Proposal
from diffray.components.decoders.lopa import branch_confidence, next_best
from diffray.workers.verification import Row

if TYPE_CHECKING:
    from diffray.workers.batch_state import BatchState


class Branches(NamedTuple):
    """The rows of sequences with branches."""

    canvases_GK: Tensor  # the sequence's row, those of its branches, then its own as padding
    own_N: Tensor  # the row of each branch's sequence
    rows_N: Tensor  # the branch's own row
    places_N: Tensor  # which of the next best positions it takes


def branches_of(rows: Items[Row], device: torch.device) -> Branches | None:
    """Return the branches among these rows, if there are any."""
    canvases = {row.sequence: [at] for at, row in enumerate(rows) if row.draft is None}
    for at, row in enumerate(rows):
        if row.draft is not None and not row.ahead:
            canvases[row.sequence].append(at)
    groups = [torch.tensor(each) for each in canvases.values() if len(each) > 1]
    if not groups:
        return None
    padded = pad_sequence(groups, batch_first=True, padding_value=-1)
    padded = torch.where(padded < 0, padded[:, :1], padded)
    branches = [(each[0], row, place) for each in groups for place, row in enumerate(each[1:])]
    return Branches(send(padded, device), *send(torch.tensor(branches), device).unbind(1))


def take_best(state: "BatchState", proposal: Proposal, block: Block) -> tuple[Proposal, Block]:
    """Let each sequence continue from its most promising canvas; ties go to its own."""
    assert state.branches is not None
    canvases_GK = state.branches.canvases_GK
    confidence_B = branch_confidence(proposal, state.masked_BL)
    best_G1 = confidence_B[canvases_GK].argmax(-1, keepdim=True)
    from_B = torch.arange(len(confidence_B), device=state.device)
    from_B[canvases_GK[:, 0]] = canvases_GK.gather(1, best_G1).squeeze(1)
    state.ids_BL, state.masked_BL = state.ids_BL[from_B], state.masked_BL[from_B]
    state.steps_BL, state.logprobs_BL = state.steps_BL[from_B], state.logprobs_BL[from_B]
    found = replace(
        proposal,
        ids_BL=proposal.ids_BL[from_B],
        confidence_BL=proposal.confidence_BL[from_B],
        logprob_BL=proposal.logprob_BL[from_B],
    )
    return found, replace(block, ids_BL=state.ids_BL, masked_BL=block.masked_BL[from_B])


def make_branches(state: "BatchState", proposal: Proposal, block: Block) -> None:
    """Write the next branches: each sequence's canvas with one more of the last proposals."""
    assert state.branches is not None
    _, own_N, rows_N, places_N = state.branches
    order_BL, count_B = next_best(proposal, state.first_masks(state.masked_BL))
    last = order_BL.shape[1] - 1
    chosen_N1 = order_BL[own_N, places_N.clamp(max=last)].unsqueeze(1)
    chosen_NL = torch.arange(last + 1, device=state.device) == chosen_N1
    left_NL = state.masked_BL[own_N] & ~chosen_NL
    left_NL = left_NL & (places_N < count_B[own_N]).unsqueeze(1)

    def write(onto_BL: Tensor, chosen_BL: Tensor) -> Tensor:
        values_NL = torch.where(chosen_NL, chosen_BL[own_N], onto_BL[own_N])
        return onto_BL.index_copy(0, rows_N, values_NL)

    state.ids_BL = write(state.ids_BL, proposal.ids_BL)
    state.logprobs_BL = write(state.logprobs_BL, proposal.logprob_BL.float())
    # What a branch takes becomes final with it, in the next step.
    state.steps_BL = write(
        state.steps_BL, (block.step_B + 1).unsqueeze(1).expand_as(state.steps_BL)
    )
    state.masked_BL = state.masked_BL.index_copy(0, rows_N, left_NL)
    state.steps_B = state.steps_B.index_copy(0, rows_N, state.steps_B[own_N])
