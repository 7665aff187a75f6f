"""Fast-dLLM v2's sub-block cache: most steps run a part of the block."""

from typing import TYPE_CHECKING, ClassVar, Literal

from diffray.components.cache import CachePolicy
from diffray.components.caches.exact import block_window

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class SubBlock(CachePolicy):
    """Once a sub-block's first position is decided, steps run only the sub-block.

    The K/V of the rest are read as stored by the last step that ran the whole block. Finished
    blocks are exact, as with `exact`.
    """

    bidirectional: ClassVar[bool] = False
    block_causal: ClassVar[bool] = True
    keeps_prefix: ClassVar[bool] = True
    follows_masks: ClassVar[bool] = True

    kind: Literal["sub_block"] = "sub_block"

    def window(self, sequence: "Sequence", step: int) -> tuple[int, int]:
        masked, length = sequence.block.masked, sequence.policy.iteration.sub_block()
        if step > sequence.block.first_alone and masked.any():  # the block has been run as a whole
            at = int(masked.int().argmax()) // length * length
            if not masked[at]:
                start = sequence.block.start + at
                return start, min(start + length, sequence.block.stop)
        return block_window(sequence, step)
