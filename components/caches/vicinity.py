"""Vicinity cache (dInfer): the block is run together with its neighbours."""

from typing import Literal

from pydantic import Field

from diffray.components.cache import CachePolicy, refreshes
from diffray.components.sequence import Sequence


class Vicinity(CachePolicy):
    """Cheap steps run the block, `before` positions before it and `after` positions after it.

    The first `warmup` steps of a generation, and the one after them, run everything.
    """

    kind: Literal["vicinity"] = "vicinity"
    before: int = Field(16, ge=0)
    after: int = Field(16, ge=0)
    warmup: int = Field(4, ge=0)
    refresh: int | None = Field(None, ge=1)

    def window(self, sequence: Sequence, step: int) -> tuple[int, int]:
        warming = sequence.steps_before + step <= self.warmup
        if warming or refreshes(step, self.refresh):
            return 0, sequence.kv_stop
        return max(0, sequence.start - self.before), min(
            sequence.kv_stop, sequence.stop + self.after
        )
