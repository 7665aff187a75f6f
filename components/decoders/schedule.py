"""Dream's own sampler: each step decides a number of positions that was planned beforehand."""

from collections.abc import Sequence as Items
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from diffray.components.block import Block, Proposal
from diffray.components.decoder import Decoder
from diffray.components.sequence import Sequence

_LAST = 1e3  # nats, and more than any score


class Schedule(Decoder):
    """Time goes from 1 to `eps` in equal steps; going from t to s decides 1 - s/t of the masks.

    `steps` counts the whole generation and is spread evenly over its blocks. Steps that would
    decide nothing change nothing, and are left out. Which positions: those with the largest
    probability or margin, or the smallest entropy, of the distribution that tokens are drawn from:
    Dream's `maskgit_plus`, `topk_margin` and `entropy`.
    """

    measures: ClassVar[bool] = True

    kind: Literal["schedule"] = "schedule"
    steps: int = Field(64, ge=1, le=2**16)
    eps: float = Field(1e-3, ge=0, le=1)
    order: Literal["probability", "margin", "entropy"] = "entropy"

    def accept(self, proposal: Proposal, block: Block) -> Tensor:
        assert proposal.measures is not None
        probability_BL, margin_BL, entropy_BL = proposal.measures
        orders = {"probability": probability_BL, "margin": margin_BL, "entropy": -entropy_BL}
        # Where the model would rather keep the mask, a position comes after all others.
        scores_BL = orders[self.order] - _LAST * (proposal.confidence_BL < 0)
        scores_BL = scores_BL.masked_fill(~block.masked_BL, -torch.inf)
        # Where top-p leaves one token its probability is 1, at many positions: of equals those
        # become final that Dream's own topk over the whole canvas takes, so each row has a call.
        accepted_BL = torch.zeros_like(block.masked_BL)
        for scores_L, accepted_L, plan in zip(scores_BL, accepted_BL, block.plans, strict=True):
            canvas_N = pad(scores_L[: plan.stop - plan.start], (plan.start, 0), value=-torch.inf)
            accepted_L[canvas_N.topk(plan.share).indices - plan.start] = True
        return accepted_BL & block.masked_BL

    def shares(self, sequence: Sequence) -> Items[int]:
        index, count = sequence.index, sequence.num_blocks
        steps = self.steps * (index + 1) // count - self.steps * index // count
        masks = sequence.stop - max(sequence.start, sequence.prompt_len)
        return _plan(max(steps, 1), self.eps, masks, sequence.policy.iteration.first_alone)


@lru_cache(maxsize=256)
def _plan(steps: int, eps: float, masks: int, first_alone: bool) -> tuple[int, ...]:
    times = torch.linspace(1, eps, steps + 1)  # float32, as Dream's: close calls are cut off alike
    rates = 1 - times[1:] / times[:-1]
    rates[-1] = 1
    found, step = ([1], 1) if first_alone else ([], 0)
    while (left := masks - sum(found)) and step < steps:
        taken = (left * rates[step:]).int()
        step += int((taken > 0).int().argmax())
        found.append(int(left * rates[step]))
        step += 1
    return (*found, left) if left else tuple(found)
