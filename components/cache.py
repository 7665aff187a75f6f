"""What a cache policy is: which positions a step runs; all others are read from the K/V pool."""

from abc import ABC, abstractmethod
from typing import ClassVar

from diffray.components.config import PolicyPart
from diffray.components.sequence import Sequence


class CachePolicy(PolicyPart, ABC):
    """One function, `window`, and which models it is right for."""

    bidirectional: ClassVar[bool] = True  # makes sense where later positions are seen
    block_causal: ClassVar[bool] = False  # makes sense where they are not
    keeps_prefix: ClassVar[bool] = False  # a long prompt may be stored in chunks beforehand

    @abstractmethod
    def window(self, sequence: Sequence, step: int) -> tuple[int, int]:
        """Return the positions [start, stop) to run at this step of the sequence's block."""


def refreshes(step: int, every: int | None) -> bool:
    """Return whether an approximate cache runs everything at this step of a block.

    It does at the first, and at every n-th where n is given. dInfer's `cache_update_freq` counts
    otherwise: iterations of the whole generation, each of which is two forwards where it refreshes.
    """
    return step == 0 or (every is not None and step % every == 0)
