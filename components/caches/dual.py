"""Dual cache (Fast-dLLM): everything outside the block runs once per block."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from diffray.components.cache import CachePolicy, refreshes

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class Dual(CachePolicy):
    """A block's first step runs everything, the others run only the block."""

    kind: Literal["dual"] = "dual"
    refresh: int | None = Field(
        None,
        ge=1,
        description="Run everything at every n-th step of a block; default: only at the first.",
    )

    def window(self, sequence: "Sequence", step: int) -> tuple[int, int]:
        if refreshes(step, self.refresh):
            return 0, sequence.block.kv_stop
        return sequence.block.read_start, sequence.block.stop
