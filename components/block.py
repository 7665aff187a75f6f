"""What decoders see: the rows' current blocks, and what the model proposes for them.

Letters: B rows, L positions of the longest block; shorter blocks are padded with positions that
are neither masked nor editable. Q rows that ask for a ranking, K ids in each.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """The current block of each row, before this step's tokens are accepted."""

    ids_BL: Tensor
    masked_BL: Tensor  # still to be decided
    editable_BL: Tensor  # decided, but written by the model: an editing decoder may replace it
    positions_BL: Tensor
    seed_B: Tensor
    step_B: Tensor  # denoising steps of the whole generation before this one
    step_in_block_B: Tensor
    length_B: Tensor  # positions of the block, without padding
    index_B: Tensor  # this block is the index-th ...
    count_B: Tensor  # ... of so many that the generation has
    floor_B: Tensor  # the iteration asks for at least this threshold
    plans: tuple["Plan", ...] = ()  # one for each row, where some decoder plans its shares

    def steps_of(self, steps: int) -> Tensor:
        """Return how many of a whole generation's steps fall to each row's block."""
        before_B = steps * self.index_B // self.count_B
        return steps * (self.index_B + 1) // self.count_B - before_B

    def rows(self, index: Tensor, members: Items[int]) -> "Block":
        """Return some of the rows, whose numbers are given on the device and on the host."""
        plans = tuple(self.plans[member] for member in members) if self.plans else ()
        tensors = (f.name for f in fields(self) if f.name != "plans")
        return Block(**{name: getattr(self, name)[index] for name in tensors}, plans=plans)


class Plan(NamedTuple):
    """What the host knows of a row before the step is run."""

    start: int  # of the block, on the canvas
    stop: int
    share: int  # how many positions become final, as `Decoder.shares` has it


class Top(NamedTuple):
    """The most probable ids of some positions, best first."""

    cells_Q: Tensor  # flat index into [B, L]
    ids_QK: Tensor
    logprobs_QK: Tensor


class Measures(NamedTuple):
    """What decoders may ask about the distributions that tokens are drawn from.

    These are the model's, over the temperature and cut by top-k and top-p; unlike in what is drawn,
    the mask counts. Where no token is proposed all three are 0.
    """

    probability_BL: Tensor  # of the proposed token
    margin_BL: Tensor  # between the largest probability and the second
    entropy_BL: Tensor  # in nats


@dataclass(frozen=True, slots=True)
class Proposal:
    """One token for each position of the head's rows; never the mask token.

    `confidence` is its probability under the model, without temperature; 0 for a token in the
    request's `zero_confidence_token_ids`. Where the model would rather keep the mask it is that
    minus one: below every real confidence, yet still in order, so that a row in which nothing else
    is left still takes its best position. Elsewhere it is -inf.
    """

    ids_BL: Tensor
    confidence_BL: Tensor
    logprob_BL: Tensor
    top: Top | None = None  # where a request asks for it; decoders see none
    measures: Measures | None = None  # where a decoder asks for them

    def rows(self, index: Tensor) -> "Proposal":
        """Return some of the rows, as a decoder sees them."""
        measures = self.measures and Measures(*(part[index] for part in self.measures))
        return Proposal(
            self.ids_BL[index],
            self.confidence_BL[index],
            self.logprob_BL[index],
            measures=measures,
        )
