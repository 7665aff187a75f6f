"""The first step of a pinned block decides which positions of its slots are unused.

Letters: B rows, L positions of the longest block.
"""

from typing import TYPE_CHECKING

import torch

from diffray.components.backend import send
from diffray.components.pinned_canvas import PinnedCanvas
from diffray.components.sequence import Sequence
from diffray.workers.features.feature import Acceptance, Feature

if TYPE_CHECKING:
    from diffray.workers.batch_state import BatchState


class SlotLengths(Feature):
    """The end token of each row that is measured."""

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.may_shrink

    waits = uses

    def begin(self, rows: "BatchState") -> None:
        ends = [
            canvas.template.end_id
            if isinstance(canvas := row.sequence.canvas, PinnedCanvas)
            and row.sequence.may_shrink
            and row.copy is None
            else -1
            for row in rows.rows
        ]
        whole = [row.sequence.policy.decoder.whole_slots for row in rows.rows]
        self.end_B1 = send(torch.tensor(ends), rows.device).unsqueeze(1)
        self.whole_B1 = send(torch.tensor(whole), rows.device).unsqueeze(1)

    def accept(self, rows: "BatchState", step: Acceptance) -> None:
        """Accept unused positions; in rows that have any, only decoders of whole slots add more."""
        unused_BL = (step.proposal.ids_BL == self.end_B1) & step.masked_BL
        # If all are used, the next step would see the same canvas, so there is no need to wait.
        others_B1 = self.whole_B1 | ~unused_BL.any(-1, keepdim=True)
        step.accepted_BL = unused_BL | (step.accepted_BL & others_B1)
