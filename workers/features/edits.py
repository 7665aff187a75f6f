"""Edits: decoders that may replace tokens, also after the last mask.

Letters: B rows, L positions of the longest block.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.block import Block
from diffray.components.config import LARGEST
from diffray.components.sequence import Sequence
from diffray.workers.features.feature import Acceptance, Feature

if TYPE_CHECKING:
    from diffray.workers.batch_state import BatchState


class Edits(Feature):
    """Which positions may be edited, and for how many steps."""

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.policy.decoder.edits

    def begin(self, rows: "BatchState") -> None:
        facts = [
            (
                s.canvas.prompt_len if s.policy.decoder.edits else s.block.stop,
                s.most_post_steps,
                s.policy.decoder.last_step() or LARGEST,
            )
            for s in (row.sequence for row in rows.rows)
        ]
        first_B, self.most_B, self.last_B = send(torch.tensor(facts).T.contiguous(), rows.device)
        self.ours_BL = rows.places.inside_BL & (rows.places.positions_BL >= first_B.unsqueeze(1))

    def show(self, rows: "BatchState", block: Block) -> Block:
        editable_BL = self.ours_BL & ~rows.masked_BL & ~rows.done_B.unsqueeze(1)
        return replace(block, editable_BL=editable_BL)

    def done(self, rows: "BatchState", step: Acceptance, done_B: Tensor) -> Tensor:
        """Go on after the last mask until a step changes nothing, or there were enough."""
        masked_B = step.block.masked_BL.any(-1)
        rows.post_steps_B = rows.post_steps_B + (~rows.done_B & ~masked_B)
        enough_B = (rows.post_steps_B >= self.most_B) | (masked_B & (rows.steps_B >= self.last_B))
        settled_B: Tensor = ~step.accepted_BL.any(-1) | enough_B
        return done_B & settled_B
