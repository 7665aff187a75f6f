"""Guidance: each guided row's copy without the prompt repeats its block.

Letters: G guided rows, L positions of the longest block, U guided rows of the head, V this rank's
vocabulary.
"""

from typing import TYPE_CHECKING

import torch

from diffray.components.backend import send
from diffray.components.sequence import Sequence
from diffray.workers.draws import joined, repeated
from diffray.workers.features.feature import Acceptance, Feature, StoredLogits

if TYPE_CHECKING:
    from diffray.workers.batch_plan import BatchPlan
    from diffray.workers.batch_state import BatchState
    from diffray.workers.head_plan import HeadPlan


class Guidance(Feature):
    """Guided rows, whose logits move away from those without the prompt, as in LLaDA's sampler."""

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.uncond is not None

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

    def plan_head(self, head: "HeadPlan") -> None:
        layout = head.layout
        rows, blind, scales = [], [], []
        for block in head.blocks_of(self):
            window, own = layout.windows[block.number], layout.offsets[block.number]
            other = layout.offset_of(window._replace(copy=block.sequence.uncond))
            rows.append(block.rows_N)
            blind.append(head.on_host_R[block.span] + other - own)
            scales.append((block.rows_N, block.sequence.policy.cfg_scale))
        for tokens in blind:
            head.read(tokens)
        self.rows_U, self.blind_U = joined(rows, head.device), joined(blind, head.device)
        self.scale_U1 = repeated(scales, torch.float64, head.device).unsqueeze(1)

    def needs_logits(self, head: "HeadPlan") -> bool:
        return True

    def read(self, plan: "BatchPlan", head: StoredLogits) -> None:
        values_RV = head.logits.values_RV
        blind_UV = plan.model.head(head.hidden_TH.index_select(0, self.blind_U)).to(values_RV)
        away_UV = values_RV[self.rows_U].sub_(blind_UV).mul_(self.scale_U1.to(values_RV) + 1)
        values_RV[self.rows_U] = away_UV.add_(blind_UV)

    def written(self, rows: "BatchState", step: Acceptance) -> None:
        rows.put(rows.slots.ids_SN, rows.ids_BL[self.rows_G], self.cells_GL)
