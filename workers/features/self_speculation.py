"""Self-speculation: drafts that a causal forward verifies.

Letters: B rows, L positions of the longest block.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.block import Block
from diffray.components.sequence import Sequence
from diffray.workers.features.feature import Acceptance, Feature

if TYPE_CHECKING:
    from diffray.workers.batch_state import BatchState


class Drafting(Feature):
    """Rows whose decoder accepts drafts, and rows that verify them."""

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.block.drafted

    waits = uses  # only a verified block has an end

    def begin(self, rows: "BatchState") -> None:
        facts = []
        for s in (row.sequence for row in rows.rows):
            drafts = s.block.num_drafts if s.block.drafted else s.block.length
            facts.append((s.block.verifies, s.policy.iteration.strided, drafts))
        facts_B1 = send(torch.tensor(facts).T.contiguous(), rows.device).unsqueeze(2)
        verifies_B1, strided_B1, self.drafts_B1 = facts_B1.unbind()
        self.verifies_B1, self.strided_B1 = verifies_B1.bool(), strided_B1.bool()
        self.at_L = torch.arange(rows.length, device=rows.device)
        self.drafted_BL = self.at_L < self.drafts_B1

    def show(self, rows: "BatchState", block: Block) -> Block:
        open_BL = block.masked_BL & self.drafted_BL
        open_BL = torch.where(self.verifies_B1, rows.places.inside_BL, open_BL)
        return replace(block, masked_BL=open_BL)

    def accept(self, rows: "BatchState", step: Acceptance) -> None:
        """Accept drafts as far as they are what is proposed now, and one token more."""
        right_BL = (step.proposal.ids_BL == step.block.ids_BL) & self.drafted_BL
        before_BL = right_BL.cumprod(1).roll(1, 1)  # whether all before a position are right
        before_BL[:, 0] = 1
        final_BL = before_BL.bool() & rows.places.inside_BL
        step.accepted_BL = torch.where(self.verifies_B1, final_BL, step.accepted_BL)

    def after(self, rows: "BatchState", step: Acceptance) -> None:
        """Mask the drafts that were wrong; if a strided row has none, show it the next ones."""
        left_BL = self.verifies_B1 & rows.places.inside_BL & ~step.accepted_BL
        whole_B1 = (step.accepted_BL & (self.at_L == self.drafts_B1)).any(1, keepdim=True)
        shown_BL = step.proposal.ids_BL.where(whole_B1 & self.strided_B1, rows.slots.mask_token_id)
        rows.ids_BL = shown_BL.where(left_BL, rows.ids_BL)
        rows.masked_BL = rows.masked_BL | left_BL

    def done(self, rows: "BatchState", step: Acceptance, done_B: Tensor) -> Tensor:
        verified_B: Tensor = done_B | self.verifies_B1.squeeze(1)
        return verified_B
