"""Dream's own sampler: each step decides a number of positions that was planned beforehand."""

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from diffray.components.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal
    from diffray.components.sequence import Sequence


class Schedule(Decoder):
    """Time goes from 1 to `eps` in equal steps; going from t to s decides 1 - s/t of the masks.

    First those with the largest probability (Dream's `maskgit_plus`) or margin (`topk_margin`), or
    the least entropy. `steps` is spread evenly over blocks; idle steps are skipped.
    """

    counts_canvas: ClassVar[bool] = True
    measures: ClassVar[bool] = True

    kind: Literal["schedule"] = "schedule"
    steps: int = Field(64, ge=1, le=2**12, description="Steps of the whole canvas.")
    eps: float = Field(1e-3, ge=0, le=1, description="The time at which the schedule ends.")
    order: Literal["probability", "margin", "entropy"] = Field("entropy", description="Ranking.")

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        assert proposal.measures is not None
        probability_BL, margin_BL, entropy_BL = proposal.measures
        orders = {"probability": probability_BL, "margin": margin_BL, "entropy": -entropy_BL}
        # Positions where the model prefers the mask come after all others.
        scores_BL = orders[self.order] - 1e3 * (proposal.confidence_BL < 0)
        scores_BL.masked_fill_(~block.masked_BL, -math.inf)
        # Ties are broken as in Dream: by topk over a canvas. Pinned blocks may have fewer masks.
        accepted_BL = block.masked_BL.clone()
        for scores_L, accepted_L, plan in zip(scores_BL, accepted_BL, block.plans, strict=True):
            canvas_N = scores_L.new_full((plan.stop,), -math.inf)
            canvas_N[plan.start :] = scores_L[: plan.stop - plan.start]
            taken_N = canvas_N.new_zeros(plan.stop).index_fill(0, canvas_N.topk(plan.share)[1], 1)
            accepted_L[: plan.stop - plan.start] = taken_N[plan.start :] > 0
        return accepted_BL & block.masked_BL

    def shares(self, sequence: "Sequence") -> tuple[int, ...]:
        index, count = sequence.canvas.place_of(sequence.block.index)
        steps = self.steps * (index + 1) // count - self.steps * index // count
        masks = sequence.block.length - sequence.block.num_prompt
        from diffray.kernels.step_shares import dream_shares  # with torch: options do without

        return dream_shares(max(steps, 1), self.eps, masks, sequence.block.first_alone)
