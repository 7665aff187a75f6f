"""A canvas whose blocks are drafts: a block starts where the tokens that were verified end."""

from dataclasses import dataclass, field

import torch

from diffray.components.canvas import Canvas, OpenBlock
from diffray.components.speculation import Record, strided_drafts

_GUESS, _WEIGHT = 0.6, 1.0  # of how many drafts are right
_KEPT = 0.95  # of what is known of them, after each forward


@dataclass(eq=False)
class DraftedCanvas(Canvas):
    """Blocks of up to `block_length` tokens, of which the last follows the drafts.

    A block is run from the position before it, whose token is final but whose K/V are not. Blocks
    of a strided iteration begin with the drafts of the step before, which are not masked, and have
    `block_length` positions more, or fewer if not so many drafts pay.
    """

    accepted: Record = field(init=False, default_factory=Record)  # of a strided iteration's drafts

    def set_end(self, index: int) -> None:
        """Set where it ends: the last block may draft more than was asked for."""
        self.limit = self.prompt_len + self.max_tokens
        self.num_blocks = self.added_blocks = self.max_tokens  # one of them takes a token or more
        strided = self.policy.iteration.strided
        self.blocks_stop = self.limit + (0 if strided else self.policy.block_length - 1)
        self.blocks_stop = max(min(self.blocks_stop, self.context), self.limit)

    def is_last(self, block: OpenBlock, *, ended: bool) -> bool:
        return block.stop >= self.limit

    def place_of(self, index: int) -> tuple[int, int]:
        return index, self.num_blocks

    def cut(self, block: OpenBlock, length: int) -> None:
        """End a block after this many positions: its other drafts were wrong.

        If none was, what a strided step wrote behind them are the next drafts.
        """
        whole = self.policy.iteration.strided and length > block.num_drafts
        self.num_drafts = block.length - length if whole else 0
        self.accepted.fade(_KEPT)
        self.accepted.add(length - 1, min(length, block.num_drafts))
        block.stop = block.start + length

    def _own_length(self, room: int) -> int:
        """Return how many positions a block has behind the drafts before it."""
        most = min(self.policy.block_length, room)
        if not self.policy.iteration.strided:
            return most
        rate = self.accepted.over(_GUESS, _WEIGHT)
        return strided_drafts(most - 1, rate, self.overhead) + 1

    def block_at(self, index: int) -> OpenBlock:
        start = self.prompt_len + len(self.final)
        # Drafts follow a token of the answer, so the first one is written alone.
        room = max(self.blocks_stop - start, 0)
        length = min(self.num_drafts + self._own_length(room), room) if self.final else min(1, room)
        stop = start + length
        masked, drafts = torch.ones(length, dtype=torch.bool), max(length - 1, 0)
        if self.policy.iteration.strided:
            drafts = min(drafts, self.num_drafts)
            masked[:drafts] = False
        return OpenBlock(
            index=index,
            start=start,
            stop=stop,
            kv_stop=stop - 1,
            read_start=start - 1,
            first_alone=False,
            num_prompt=0,
            masked=masked,
            drafted=True,
            num_drafts=drafts,
        )
