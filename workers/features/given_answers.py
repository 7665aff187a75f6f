"""Given answers: each position gets its token, whose log-probability is reported.

Letters: N rows of a block, R rows of the head.
"""

from typing import TYPE_CHECKING

import torch

from diffray.components.propose import Chosen
from diffray.components.sequence import Sequence
from diffray.workers.draws import joined
from diffray.workers.features.feature import Feature

if TYPE_CHECKING:
    from diffray.workers.head_plan import HeadPlan


class GivenAnswers(Feature):
    """The rows of canvases whose answer is given."""

    fused = True

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return bool(sequence.canvas.answer)

    def plan_head(self, head: "HeadPlan") -> None:
        rows, ids = [], []
        for block in head.blocks_of(self):
            head.claim(block)
            canvas = block.sequence.canvas
            place_N = block.positions_N - canvas.prompt_len
            ours_N = place_N < len(canvas.answer)  # a block may be longer
            rows.append(block.rows_N[ours_N])
            ids.append(torch.tensor(canvas.answer)[place_N[ours_N]])
        self.rows_N, self.ids_N = joined(rows, head.device), joined(ids, head.device)

    def needs_logits(self, head: "HeadPlan") -> bool:
        return True

    def choose(self, chosen: Chosen) -> None:
        chosen.ids_R = chosen.ids_R.index_copy(0, self.rows_N, self.ids_N)
