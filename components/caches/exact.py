"""Exact cache of block-causal models: what stands before the block is final and never changes."""

from typing import ClassVar, Literal

from diffray.components.cache import CachePolicy
from diffray.components.sequence import Sequence


class Exact(CachePolicy):
    """Steps run the block alone.

    The first step of a block also runs what was not final when its K/V were stored, usually the
    block before, so no forward is spent on that alone.
    """

    bidirectional: ClassVar[bool] = False
    block_causal: ClassVar[bool] = True
    keeps_prefix: ClassVar[bool] = True

    kind: Literal["exact"] = "exact"

    def window(self, sequence: Sequence, step: int) -> tuple[int, int]:
        start = sequence.read_start
        return (min(sequence.clean_end, start) if step == 0 else start), sequence.stop
