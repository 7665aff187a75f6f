"""One generation in progress: host integers only, and the arithmetic of its blocks.

    0          prompt_len     start        stop         blocks_stop    length
    |--- prompt ---|--- final ---|- current -|---- masks ----|-- suffix --|
    |--- K/V from final tokens ---|                clean_end <= start (block-causal models)

Blocks are cut from `anchor`: the end of the prompt for bidirectional models, 0 for block-causal
ones, whose first block may begin inside the prompt. The last block of a bidirectional model is cut
short at prompt + max_tokens, where a given suffix follows; a block-causal canvas has none, and is
rounded up to whole blocks.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffray.components.decoder import Memory

if TYPE_CHECKING:
    from diffray.components.params import SamplingParams
    from diffray.components.policy import Policy


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one request that is not on the device."""

    uid: int
    prompt: tuple[int, ...]
    params: "SamplingParams"
    policy: "Policy"
    block_causal: bool
    end_ids: frozenset[int]  # tokens that end the text, unless ignored
    suffix: tuple[int, ...] = ()
    watch: bool = False  # whether updates show the canvas

    # Progress. Finished blocks are in `final`; the current block lives in the engine's slots.
    index: int = 0  # blocks finished
    step: int = 0  # denoising steps of the current block
    settled: int = 0  # of them, those after the last mask was gone
    steps_before: int = 0  # denoising steps of the blocks before it
    clean_end: int = 0
    forwards: int = 0
    final: list[int] = field(default_factory=list)
    emitted: int = 0  # tokens reported so far
    end_id: int | None = None  # the end token that was reported; nothing after it will be
    told: tuple[int, int] = (0, 0)  # finished blocks that were reported in full, and their steps

    # What the engine lent it.
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    slots_N: Tensor | None = None
    twin_pages: list[int] = field(default_factory=list)
    twin_slots_N: Tensor | None = None
    memory: Memory | None = None  # of the decoder, for the current block
    masked_L: Tensor | None = None  # what is left of the current block; None where it is untouched
    top: tuple[Tensor, Tensor] | None = None  # most probable ids and log-probabilities of its final

    @property
    def seed(self) -> int:
        """The seed; engines draw none, so where the caller did not it is 0."""
        return self.params.seed or 0

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def anchor(self) -> int:
        return 0 if self.block_causal else self.prompt_len

    @property
    def limit(self) -> int:
        """The end of what the request asked for."""
        return self.prompt_len + self.params.max_tokens

    @property
    def blocks_stop(self) -> int:
        """The end of the last block."""
        if not self.block_causal:
            return self.limit
        block = self.policy.block_length
        return -(-self.limit // block) * block

    @property
    def length(self) -> int:
        """The length of the canvas."""
        return self.blocks_stop + len(self.suffix)

    @property
    def first_block(self) -> int:
        return (self.prompt_len - self.anchor) // self.policy.block_length

    @property
    def num_blocks(self) -> int:
        """How many blocks the generation touches."""
        return -(-(self.blocks_stop - self.anchor) // self.policy.block_length) - self.first_block

    @property
    def start(self) -> int:
        return self.anchor + (self.first_block + self.index) * self.policy.block_length

    @property
    def stop(self) -> int:
        return min(self.start + self.policy.block_length, self.blocks_stop)

    @property
    def masked(self) -> Tensor:
        """Which positions of the current block are masked, on the host."""
        if self.masked_L is not None:
            return self.masked_L
        return torch.arange(self.start, self.stop) >= self.prompt_len

    @property
    def kv_stop(self) -> int:
        """The end of the positions that the current block sees."""
        return self.stop if self.block_causal else self.length

    @property
    def causal_block(self) -> int:
        """The block length of block-causal attention; 0 where attention is bidirectional."""
        return self.policy.block_length if self.block_causal else 0

    @property
    def guided(self) -> bool:
        return self.policy.cfg_scale > 0

    @property
    def given(self) -> int:
        """How many positions of the current block, from its start, belong to the prompt."""
        return max(self.prompt_len - self.start, 0)

    @property
    def steps_ahead(self) -> int:
        """How many steps the current block will most probably still take, at least 1.

        Half of what its masks would take at the pace so far, of this block or of all, whichever was
        faster: blocks end sooner than they began. A block's first step tells nothing yet.
        """
        if self.step == 0:
            return 1
        masks = int(self.masked.sum())
        here = self.stop - max(self.start, self.prompt_len) - masks
        overall = (len(self.final) + here) / (self.steps_before + self.step)
        return max(int(masks / (2 * max(here / self.step, overall, 1.0))), 1)

    def finish_block(self, ids: list[int]) -> None:
        """Record the current block's tokens as final and move to the next block."""
        self.final += ids[self.given :]
        self.clean_end = self.start
        self.steps_before += self.step
        self.index += 1
        self._leave_block()

    def rewind(self) -> None:
        """Go back to where a restart is exact, keeping all final tokens that it can.

        Decoders' memories and approximate caches begin anew with each block, so that is the start
        of the current block; soft embeddings are carried over from block to block, so a soft
        generation begins anew and finds the same tokens again.
        """
        if self.policy.iteration.soft:
            self.index = self.steps_before = 0
            self.final = []
        self.clean_end = 0
        self._leave_block()

    def resume(self, ids: Items[int], told: tuple[int, int], forwards: int) -> None:
        """Stand where another stood that had reported these tokens, as after a rewind there."""
        self.told = told
        self.index, self.steps_before = told
        self.final = list(ids[: self.start - self.prompt_len]) if self.index else []
        self.emitted = len(ids)
        self.end_id = ids[-1] if ids and ids[-1] in self.end_ids else None
        self.forwards = forwards
        self.rewind()

    def _leave_block(self) -> None:
        self.step = self.settled = 0
        self.memory = self.masked_L = self.top = None
