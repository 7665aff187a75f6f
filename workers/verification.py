"""Drafts on the device: which of them were right, and the next ones.

Letters: B rows of sequences and drafts, L positions of the longest block, G sequences with a draft
that is this many steps ahead.
"""

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.block import Block, Proposal
from diffray.components.copies import Copy
from diffray.components.sequence import Sequence
from diffray.workers.slots import Slots

if TYPE_CHECKING:
    from diffray.workers.batch_state import BatchState


class Row(NamedTuple):
    """A canvas of a sequence: its own, a draft of it after some more steps, or a branch."""

    sequence: Sequence
    draft: Copy | None = None
    ahead: int = 0  # steps; 0: a branch, if the canvas is not the sequence's own

    @property
    def slot(self) -> int:
        return self.sequence.slot if self.draft is None else self.draft.slot


class Link(NamedTuple):
    """The rows of the drafts that are a given number of steps ahead, and of their sequences."""

    rows_G: Tensor
    drafts_G: Tensor


def rows_of(sequences: Items[Sequence]) -> list[Row]:
    """Return the sequences' own rows, then those of all drafts and branches."""
    copies = [
        Row(s, draft, 0 if s.policy.speculation is None else number)
        for s in sequences
        for number, draft in enumerate(s.drafts, 1)
    ]
    return [*map(Row, sequences), *copies]


def links_of(rows: Items[Row], slots: Slots) -> list[Link]:
    """Return the links of all rows, nearest first; new drafts get their sequence's canvas."""
    number = {row.sequence: at for at, row in enumerate(rows) if row.draft is None}
    found = []
    for ahead in range(1, max((row.ahead for row in rows), default=0) + 1):
        pairs = [(number[r.sequence], at) for at, r in enumerate(rows) if r.ahead == ahead]
        found.append(Link(*send(torch.tensor(pairs), slots.device).unbind(1)))
    new = [(row.sequence.slot, row.slot) for row in rows if row.draft and not row.draft.ready]
    if new:
        own_N, new_N = send(torch.tensor(new), slots.device).unbind(1)
        slots.ids_SN[new_N] = slots.ids_SN[own_N]
        slots.masked_SN[new_N] = False
    return found


def take_over(
    state: "BatchState", proposal: Proposal, block: Block, masked_BL: Tensor, accepted_BL: Tensor
) -> Tensor:
    """Let sequences take over the results of their drafts that were right.

    `masked_BL` is from before the step. Returns for each row the number of the row with its latest
    canvas that the model has seen.
    """
    last_B = torch.arange(len(accepted_BL), device=state.device)
    going_B = torch.ones_like(last_B, dtype=torch.bool)
    known_B = masked_BL.any(-1) & ~_guessed(accepted_BL, proposal)
    for ahead, (rows_G, drafts_G) in enumerate(state.links):
        same_GL = block.ids_BL[drafts_G] == state.ids_BL[rows_G]
        same_GL &= masked_BL[drafts_G] == state.masked_BL[rows_G]
        same_G = same_GL.all(-1)
        if not ahead:
            state.foreseen_B = torch.zeros_like(state.done_B).index_copy(0, rows_G, same_G)
        right_G = going_B[rows_G] & known_B[drafts_G] & same_G
        going_B = going_B.index_copy(0, rows_G, right_G)
        last_B = last_B.index_copy(0, rows_G, torch.where(right_G, drafts_G, last_B[rows_G]))
        written_GL = accepted_BL[drafts_G] & right_G.unsqueeze(1)
        state.ids_BL = _taken(state.ids_BL, rows_G, drafts_G, written_GL)
        state.steps_BL = _taken(state.steps_BL, rows_G, drafts_G, written_GL)
        state.logprobs_BL = _taken(state.logprobs_BL, rows_G, drafts_G, written_GL)
        left_GL = state.masked_BL[rows_G] & ~written_GL
        state.masked_BL = state.masked_BL.index_copy(0, rows_G, left_GL)
        state.steps_B = state.steps_B.index_add(0, rows_G, right_G.long())
    return last_B


def _taken(kept_BL: Tensor, rows_G: Tensor, drafts_G: Tensor, written_GL: Tensor) -> Tensor:
    taken_GL = torch.where(written_GL, kept_BL[drafts_G], kept_BL[rows_G])
    return kept_BL.index_copy(0, rows_G, taken_GL)


def make_drafts(state: "BatchState", proposal: Proposal, block: Block, last_B: Tensor) -> None:
    """Write the next drafts: what decoders would accept from the last proposals, step by step."""
    proposal = proposal.rows(last_B)
    ids_BL, masked_BL = state.ids_BL, state.masked_BL
    known_B = torch.ones_like(last_B, dtype=torch.bool)
    for ahead, (rows_G, drafts_G) in enumerate(state.links):
        steps_B = state.steps_B + ahead
        block = replace(
            block,
            ids_BL=ids_BL,
            masked_BL=state.first_masks(masked_BL),
            step_B=state.before_B + steps_B,
            step_in_block_B=steps_B,
        )
        drawn = proposal.drawn_at(block)
        accepted_BL = state.choose(drawn, block) & masked_BL
        known_B = known_B & ~_guessed(accepted_BL, drawn)
        ids_BL = torch.where(accepted_BL, drawn.ids_BL, ids_BL)
        masked_BL = masked_BL & ~accepted_BL
        state.ids_BL = state.ids_BL.index_copy(0, drafts_G, ids_BL[rows_G])
        left_GL = masked_BL[rows_G] & known_B[rows_G].unsqueeze(1)
        state.masked_BL = state.masked_BL.index_copy(0, drafts_G, left_GL)
        state.steps_B = state.steps_B.index_copy(0, drafts_G, state.steps_B[rows_G] + ahead + 1)


def _guessed(accepted_BL: Tensor, proposal: Proposal) -> Tensor:
    """Return the rows that accepted a position for which the model has proposed nothing."""
    return (accepted_BL & (proposal.confidence_BL == -torch.inf)).any(-1)
