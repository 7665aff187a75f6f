"""Exact cache of block-causal models: everything before the block is final."""

from typing import TYPE_CHECKING, ClassVar, Literal

from diffray.components.cache import CachePolicy

if TYPE_CHECKING:
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

    def window(self, sequence: "Sequence", step: int) -> tuple[int, int]:
        return block_window(sequence, step)


def block_window(sequence: "Sequence", step: int) -> tuple[int, int]:
    """Return the block; its first step also runs earlier positions not yet stored as final."""
    block, clean_end = sequence.block, sequence.kv.clean_end
    if step > 0:
        return block.read_start, block.kv_stop
    if block.first_alone:  # the position before the block decides the first one
        return min(clean_end, block.start - sequence.spec.first_shift), block.start
    return min(clean_end, block.read_start), block.kv_stop
