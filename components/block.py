"""What decoders see: the rows' current blocks, and what the model proposes for them.

Letters: B rows, L positions of the longest block; shorter blocks are padded with positions that
are neither masked nor editable.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.kernels import noise
from diffray.kernels.acceptance import TIE, highest


@dataclass(frozen=True, slots=True)
class Block:
    """The current block of each row, before this step's tokens are accepted."""

    ids_BL: Tensor
    masked_BL: Tensor  # still to be decided
    editable_BL: Tensor  # decided, but written by the model: an editing decoder may replace it
    positions_BL: Tensor
    seed_B: Tensor
    step_B: Tensor  # denoising steps of the whole generation before this one
    draw_step_B: Tensor  # what draws depend on: the same, or 0 where each position is drawn once
    step_in_block_B: Tensor
    length_B: Tensor  # positions of the block, without padding
    index_B: Tensor  # the block's number, from 0 ...
    count_B: Tensor  # ... and how many blocks the canvas has; both count from where it grew last
    floor_B: Tensor  # the lowest threshold that the iteration allows
    plans: tuple["Plan", ...] = ()  # one for each row, if any decoder plans its shares

    def steps_of(self, steps: int) -> Tensor:
        """Return how many of the whole canvas's steps each row's block gets."""
        before_B = steps * self.index_B // self.count_B
        return steps * (self.index_B + 1) // self.count_B - before_B

    def share(self, steps: int) -> Tensor:
        """Return how many positions of each row this step decides, if a block takes `steps`.

        The shares are equal; the first steps take the remaining positions, one each.
        """
        odd_B = self.step_in_block_B < self.length_B % steps
        return self.length_B // steps + odd_B

    def confident(self, confidence_BL: Tensor, threshold: float) -> Tensor:
        """Return the masks at or above the threshold, and always the row's best."""
        wanted_B = self.floor_B.clamp(min=threshold)
        best_B = confidence_BL.masked_fill(~self.masked_BL, -torch.inf).amax(-1)
        cut_B = torch.minimum(wanted_B, best_B - TIE)
        return self.masked_BL & (confidence_BL >= cut_B.unsqueeze(1))

    def above(self, confidence_BL: Tensor, threshold: float, steps: int | None = None) -> Tensor:
        """Return the masks strictly above the threshold, or the step's share of the block if more.

        The share is an equal part of the block for each of `steps`, or one position without.
        """
        wanted_B1 = self.floor_B.clamp(min=threshold).unsqueeze(1)
        share_B = torch.ones_like(self.length_B) if steps is None else self.share(steps)
        sure_BL = self.masked_BL & (confidence_BL > wanted_B1)
        return sure_BL | self.best(confidence_BL, share_B)

    def best(self, scores_BL: Tensor, count_B: Tensor) -> Tensor:
        """Return the masks with the highest `count` scores of their row; ties go to the left."""
        scores_BL = scores_BL.masked_fill(~self.masked_BL, -torch.inf)
        return self.masked_BL & highest(scores_BL, count_B)

    def drawn(self, step_B: Tensor) -> Tensor:
        """Return a random number between 0 and 1 for each position at this step, in float64."""
        shape = self.positions_BL.shape
        seed_BL, step_BL = (part.unsqueeze(1).expand(shape) for part in (self.seed_B, step_B))
        return noise.uniform(seed_BL, self.positions_BL, step_BL)

    def rows(self, index: Tensor, members: Items[int]) -> "Block":
        """Return some of the rows, given their numbers on the device and on the host."""
        plans = tuple(self.plans[member] for member in members) if self.plans else ()
        tensors = (f.name for f in fields(self) if f.name != "plans")
        return Block(**{name: getattr(self, name)[index] for name in tensors}, plans=plans)


class Plan(NamedTuple):
    """What the host knows about a row before the step runs."""

    start: int  # of the block, on the canvas
    stop: int
    share: int  # how many positions become final, according to `Decoder.shares`


class Measures(NamedTuple):
    """Measures of the distributions that tokens are drawn from, for decoders that ask for them.

    The distributions are the model's, divided by the temperature and cut by top-k and top-p; unlike
    in a draw, the mask token counts. All three are 0 where no token is proposed.
    """

    probability_BL: Tensor  # of the proposed token
    margin_BL: Tensor  # between the largest probability and the second
    entropy_BL: Tensor  # in nats


@dataclass(frozen=True, slots=True)
class Proposal:
    """One token for each position of the head's rows; never the mask token.

    `confidence` is its probability under the model, without temperature; 0 for a token in the
    request's `zero_confidence_token_ids`. Where the model prefers the mask, it is the probability
    minus one: below every real confidence but still ordered, so that a row with nothing else left
    takes its best position. Elsewhere it is -inf.
    """

    ids_BL: Tensor
    confidence_BL: Tensor
    logprob_BL: Tensor
    measures: Measures | None = None  # if a decoder asks for them
    value_BL: Tensor | None = None  # the probability of each slot's whole value, if pinned

    def rows(self, index: Tensor) -> "Proposal":
        """Return some of the rows, as a decoder sees them."""
        measures = self.measures and Measures(*(part[index] for part in self.measures))
        return Proposal(
            self.ids_BL[index],
            self.confidence_BL[index],
            self.logprob_BL[index],
            measures=measures,
            value_BL=None if self.value_BL is None else self.value_BL[index],
        )
