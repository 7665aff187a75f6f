"""A cache policy decides which positions a step runs; the others are read from the K/V pool."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from diffray.components.config import PolicyPart

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class CachePolicy(PolicyPart, ABC):
    """One function, `window`, and the models for which it is valid."""

    bidirectional: ClassVar[bool] = True  # valid for bidirectional attention
    block_causal: ClassVar[bool] = False  # valid for block-causal attention
    keeps_prefix: ClassVar[bool] = False  # a long prompt may be stored in chunks first
    follows_masks: ClassVar[bool] = False  # its window depends on which sub-block has masks

    kind: str  # subclasses have one value

    @abstractmethod
    def window(self, sequence: "Sequence", step: int) -> tuple[int, int]:
        """Return the positions [start, stop) to run at this step of the sequence's block."""


def refreshes(step: int, every: int | None) -> bool:
    """Return whether an approximate cache runs everything at this step of a block.

    It does at the first step, and at every n-th if n is given. dInfer's `cache_update_freq` counts
    iterations of the whole generation instead, and a refreshing iteration is two forwards.
    """
    return step == 0 or (every is not None and step % every == 0)
