"""Branches on the device: which canvas of a sequence is the most promising, and the next ones.

Letters: B rows of sequences and copies, L positions of the longest block, G sequences that have
branches, K canvases of each, N branches of all.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.components.backend import send
from diffray.components.decoders.lopa import branch_confidence, next_best
from diffray.components.sequence import Sequence
from diffray.workers.features.feature import Acceptance, Feature

if TYPE_CHECKING:
    from diffray.workers.batch_state import BatchState


class Branches(Feature):
    """The rows of sequences with branches."""

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.policy.speculation is None and bool(sequence.copies)

    def begin(self, rows: "BatchState") -> None:
        canvases = {row.sequence: [at] for at, row in enumerate(rows.rows) if row.copy is None}
        for at, row in enumerate(rows.rows):
            if row.copy is not None and not row.ahead:
                canvases[row.sequence].append(at)
        groups = [torch.tensor(each) for each in canvases.values() if len(each) > 1]
        padded = pad_sequence(groups, batch_first=True, padding_value=-1)
        padded = torch.where(padded < 0, padded[:, :1], padded)
        # The sequence's row, those of its branches, then its own as padding.
        self.canvases_GK = send(padded, rows.device)
        facts = [(each[0], row, place) for each in groups for place, row in enumerate(each[1:])]
        # The row of each branch's sequence, its own, and which of the next best positions it takes.
        self.own_N, self.rows_N, self.places_N = send(torch.tensor(facts), rows.device).unbind(1)

    def propose(self, rows: "BatchState", step: Acceptance) -> None:
        """Let each sequence continue from its most promising canvas; ties go to its own."""
        proposal = step.proposal
        confidence_B = branch_confidence(proposal, rows.masked_BL)
        best_G1 = confidence_B[self.canvases_GK].argmax(-1, keepdim=True)
        from_B = torch.arange(len(confidence_B), device=rows.device)
        from_B[self.canvases_GK[:, 0]] = self.canvases_GK.gather(1, best_G1).squeeze(1)
        rows.ids_BL, rows.masked_BL = rows.ids_BL[from_B], rows.masked_BL[from_B]
        rows.steps_BL, rows.logprobs_BL = rows.steps_BL[from_B], rows.logprobs_BL[from_B]
        step.proposal = replace(
            proposal,
            ids_BL=proposal.ids_BL[from_B],
            confidence_BL=proposal.confidence_BL[from_B],
            logprob_BL=proposal.logprob_BL[from_B],
        )
        masked_BL = step.block.masked_BL[from_B]
        step.block = replace(step.block, ids_BL=rows.ids_BL, masked_BL=masked_BL)

    def after(self, rows: "BatchState", step: Acceptance) -> None:
        """Write the next branches: each canvas with one more of the last proposals."""
        proposal, block = step.proposal, step.block
        own_N, places_N = self.own_N, self.places_N
        open_BL = rows.shown(replace(block, masked_BL=rows.masked_BL)).masked_BL
        order_BL, count_B = next_best(proposal, open_BL)
        last = order_BL.shape[1] - 1
        chosen_N1 = order_BL[own_N, places_N.clamp(max=last)].unsqueeze(1)
        chosen_NL = torch.arange(last + 1, device=rows.device) == chosen_N1
        left_NL = rows.masked_BL[own_N] & ~chosen_NL
        left_NL = left_NL & (places_N < count_B[own_N]).unsqueeze(1)

        def write(onto_BL: Tensor, chosen_BL: Tensor) -> Tensor:
            values_NL = torch.where(chosen_NL, chosen_BL[own_N], onto_BL[own_N])
            return onto_BL.index_copy(0, self.rows_N, values_NL)

        rows.ids_BL = write(rows.ids_BL, proposal.ids_BL)
        rows.logprobs_BL = write(rows.logprobs_BL, proposal.logprob_BL.float())
        # What a branch takes becomes final with it, in the next step.
        step_B1 = (block.step_B + 1).unsqueeze(1)
        rows.steps_BL = write(rows.steps_BL, step_B1.expand_as(rows.steps_BL))
        rows.masked_BL = rows.masked_BL.index_copy(0, self.rows_N, left_NL)
        rows.steps_B = rows.steps_B.index_copy(0, self.rows_N, rows.steps_B[own_N])
