"""No cache: every step runs everything."""

from typing import TYPE_CHECKING, ClassVar, Literal

from diffray.components.cache import CachePolicy

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class NoCache(CachePolicy):
    """Every step runs every position that the block can see."""

    block_causal: ClassVar[bool] = True

    kind: Literal["none"] = "none"

    def window(self, sequence: "Sequence", step: int) -> tuple[int, int]:
        block = sequence.block
        if block.first_alone and step == 0 and sequence.policy.causal_length:
            return 0, block.start  # the position before the block decides the first one
        return 0, block.kv_stop
