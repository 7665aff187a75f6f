"""Exact cache of block-causal models: everything before the block is final."""

from typing import ClassVar, Literal

from diffray.components.cache import CachePolicy
from diffray.components.sequence import Sequence


class Exact(CachePolicy):
    """Steps run only the block.

    A block's first step also runs the positions that were not final when their K/V were stored,
    usually the previous block, so that takes no extra forward.
    """

    bidirectional: ClassVar[bool] = False
    block_causal: ClassVar[bool] = True
    keeps_prefix: ClassVar[bool] = True

    kind: Literal["exact"] = "exact"

    def window(self, sequence: Sequence, step: int) -> tuple[int, int]:
        start = sequence.read_start
        return (min(sequence.clean_end, start) if step == 0 else start), sequence.stop
