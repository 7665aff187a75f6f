"""What the head computes for a step: a row for each position that needs a token.

Letters: B sequences, T packed tokens, L positions of the longest block, R rows of the head, N those
of a block.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.components.propose import Rows
from diffray.components.sequence import Sequence
from diffray.workers.draws import Draw, join_draws, joined
from diffray.workers.features.feature import Feature
from diffray.workers.layout import Layout, Span

if TYPE_CHECKING:
    from diffray.workers.batch_plan import BatchPlan


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The rows about one block, of a sequence or of a copy of it."""

    number: int  # of its window
    row: int  # in [B, L]
    sequence: Sequence
    span: slice
    offsets_N: Tensor  # of the rows' positions in the block

    @property
    def rows_N(self) -> Tensor:
        return torch.arange(self.span.start, self.span.stop)

    @property
    def positions_N(self) -> Tensor:
        return self.sequence.block.start + self.offsets_N

    @property
    def distribution(self) -> Draw:
        """The distributions of the rows' tokens: those of greedy requests at temperature 1."""
        params, temperature = self.sequence.params, self.sequence.temperature
        filters = max(params.top_k, 0), params.top_p, params.min_p
        return Draw(self.rows_N, temperature(self.sequence.block.step), *filters)

    @property
    def draw(self) -> Draw | None:
        """How the rows draw; None if the request is greedy."""
        return self.distribution if self.sequence.params.draws else None


class HeadPlan:
    """The head's rows; features may add tokens to read, and choose the tokens of some rows."""

    def __init__(
        self, plan: "BatchPlan", blocks: list[BlockRows], tokens_R: Tensor, cells_R: Tensor
    ) -> None:
        self.layout: Layout = plan.layout
        self.length, self.device = plan.length, plan.device
        self.blocks, self.on_host_R = blocks, tokens_R
        self._read = [tokens_R]
        self.claimed: set[int] = set()  # numbers of blocks whose tokens a feature chooses
        for feature in plan.features:
            feature.plan_head(self)
        self.tokens_R = joined([tokens_R], self.device)  # index into the packed hidden states
        self.read_T = self.tokens_R if len(self._read) == 1 else joined(self._read, self.device)
        free = [each.draw for each in blocks if each.number not in self.claimed]
        draws = join_draws([draw for draw in free if draw is not None], self.device)
        self.rows = Rows(joined([cells_R], self.device), draws)
        # If each row needs just one token, logits are not stored.
        filtered = draws is not None and draws.filtered
        self.plain = not filtered and not any(f.needs_logits(self) for f in plan.features)

    def blocks_of(self, feature: Feature) -> list[BlockRows]:
        """Return the blocks of the sequences that use a feature."""
        return [each for each in self.blocks if feature.uses(each.sequence)]

    def read(self, tokens_T: Tensor) -> None:
        """Let the model compute the hidden states of these packed tokens too."""
        self._read.append(tokens_T)

    def claim(self, block: BlockRows) -> None:
        """Let a feature choose the tokens of a block, whose rows then do not draw on their own."""
        self.claimed.add(block.number)


def plan_head(plan: "BatchPlan") -> HeadPlan:
    """Collect the positions of all blocks that need a token.

    A sequence occurs once for each of its canvases that are run.
    """
    sequences = [plan.rows[at].sequence for at in plan.running]
    windows = plan.layout.windows[: len(sequences)]
    wanted = [
        _wanted(s, window, only_first=plan.first_only[at])
        for s, window, at in zip(sequences, windows, plan.running, strict=True)
    ]
    wanted_BL = pad_sequence(wanted, batch_first=True)
    number_R, offset_R = wanted_BL.nonzero().unbind(1)
    spans = [slice(*span) for span in pairwise(accumulate(wanted_BL.sum(1).tolist(), initial=0))]
    blocks = [
        BlockRows(number, row, sequence, span, offset_R[span])
        for number, (row, sequence, span) in enumerate(
            zip(plan.running, sequences, spans, strict=True)
        )
    ]
    begins = zip(plan.layout.offsets, windows, strict=False)
    before_B = torch.tensor([offset - window.start for offset, window in begins])
    # Position 0 has no position before it, so it reads its own logits even if they are shifted.
    alone = [plan.first_only[at] for at in plan.running]
    pairs = zip(sequences, alone, strict=True)
    first_B = torch.tensor([s.block.start - s.shift(alone=first) for s, first in pairs])
    tokens_R = before_B[number_R] + (first_B[number_R] + offset_R).clamp(min=0)
    cells_R = torch.tensor(plan.running)[number_R] * plan.length + offset_R
    return HeadPlan(plan, blocks, tokens_R, cells_R)


def _wanted(sequence: Sequence, window: Span, *, only_first: bool) -> Tensor:
    """Return the positions of its block at which the sequence needs a token, as a mask."""
    positions = torch.arange(sequence.block.start, sequence.block.stop)
    if only_first:
        return positions == sequence.block.start
    wanted = sequence.block.masked
    if sequence.block.drafted:
        return positions >= sequence.block.start if sequence.block.verifies else wanted[:-1]
    if sequence.policy.decoder.edits:
        wanted = positions >= sequence.canvas.prompt_len
    if sequence.policy.cache.follows_masks:
        first = window.start + sequence.spec.logit_shift
        wanted = wanted & (positions >= first) & (positions < window.stop)
    return wanted
