"""Guidance: each guided row's copy without the prompt repeats its block.

Letters: G guided rows, L positions of the longest block.
"""

from typing import TYPE_CHECKING, Self

import torch

from diffray.components.backend import send
from diffray.workers.features.feature import Acceptance, Feature

if TYPE_CHECKING:
    from diffray.workers.batch_plan import BatchPlan
    from diffray.workers.batch_state import BatchState


class Guidance(Feature):
    """The cells of the copies where the rows' blocks are repeated."""

    @classmethod
    def of(cls, plan: "BatchPlan") -> Self | None:
        return cls() if any(s.uncond is not None for s in plan.sequences) else None

    def begin(self, rows: "BatchState") -> None:
        facts = [
            (b, s.uncond.slot * rows.slots.length, s.canvas.prompt_len)
            for b, s in enumerate(rows.sequences)
            if s.uncond is not None
        ]
        self.rows_G, base_G, given_G = send(torch.tensor(facts), rows.device).unbind(1)
        positions_GL = rows.places.positions_BL[self.rows_G]
        ours_GL = rows.places.inside_BL[self.rows_G] & (positions_GL >= given_G.unsqueeze(1))
        cells_GL = base_G.unsqueeze(1) + positions_GL
        self.cells_GL = torch.where(ours_GL, cells_GL, rows.slots.trash)

    def written(self, rows: "BatchState", step: Acceptance) -> None:
        rows.put(rows.slots.ids_SN, rows.ids_BL[self.rows_G], self.cells_GL)
