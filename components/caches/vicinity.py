"""Vicinity cache (dInfer): a step runs the block and its neighbours."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from diffray.components.cache import CachePolicy, refreshes

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class Vicinity(CachePolicy):
    """Most steps run the block, `before` positions before it and `after` positions after it.

    The first `warmup` steps of a generation, the one after them, and the first of each block run
    everything. dInfer runs everything once more if the first block ends within the warm-up: its
    `past is None or (require_update(...) and block_id > 0)` then skips `require_update`, which
    mistakes the block for a new one two forwards later. That is not reproduced.
    """

    kind: Literal["vicinity"] = "vicinity"
    before: int = Field(16, ge=0, description="Positions before the block that are run with it.")
    after: int = Field(16, ge=0, description="Positions after the block that are run with it.")
    warmup: int = Field(4, ge=0, description="Steps at the start that run everything.")
    refresh: int | None = Field(
        None,
        ge=1,
        description="Run everything at every n-th step of a block; default: only at the first.",
    )

    @property
    def neighbours(self) -> int:
        return self.before + self.after

    def window(self, sequence: "Sequence", step: int) -> tuple[int, int]:
        warming = sequence.steps_before + step <= self.warmup
        if warming or refreshes(step, self.refresh):
            return 0, sequence.block.kv_stop
        return max(0, sequence.block.read_start - self.before), min(
            sequence.block.kv_stop, sequence.block.stop + self.after
        )
