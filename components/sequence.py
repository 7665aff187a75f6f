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
from diffray.components.transforms import RowTransform, transforms_of

if TYPE_CHECKING:
    from diffray.components.params import SamplingParams
    from diffray.components.policy import Policy
    from diffray.components.prefixes import Node

_SHORT = 32  # positions; a block of fewer may settle for as many steps as one of so many


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one request that is not on the device."""

    uid: int
    prompt: tuple[int, ...]
    params: "SamplingParams"
    policy: "Policy"
    block_causal: bool
    end_ids: frozenset[int]  # tokens that end the text, unless ignored
    logit_shift: int = 0
    suffix: tuple[int, ...] = ()
    watch: bool = False  # whether updates show the canvas
    cache_salt: str = ""  # K/V are shared with those of the same alone

    # Its canvas, all of it ...
    seed: int = field(init=False)  # engines draw none, so where the caller did not it is 0
    prompt_len: int = field(init=False)
    anchor: int = field(init=False)
    limit: int = field(init=False)  # the end of what the request asked for
    blocks_stop: int = field(init=False)  # the end of the last block
    length: int = field(init=False)
    first_block: int = field(init=False)
    num_blocks: int = field(init=False)  # how many blocks the generation touches
    causal_block: int = field(init=False)  # of block-causal attention; 0: it goes both ways
    guided: bool = field(init=False)
    transforms: tuple[RowTransform, ...] = field(init=False)  # of its rows' logits, in order
    # ... and the current block.
    start: int = field(init=False)
    stop: int = field(init=False)
    kv_stop: int = field(init=False)  # the end of the positions that it sees
    read_start: int = field(init=False)  # the first position that the block's logits come from
    prompt_in_block: int = field(
        init=False
    )  # how many of its positions, from its start, are the prompt's

    # Progress. Finished blocks are in `final`; the current block lives in the engine's slots.
    index: int = 0  # blocks finished
    step: int = 0  # denoising steps of the current block
    post_steps: int = 0  # of them, those after the last mask was gone
    steps_before: int = 0  # denoising steps of the blocks before it
    clean_end: int = 0
    cached: int = 0  # of its prompt, what it did not have to run itself
    forwards: int = 0
    final: list[int] = field(default_factory=list)
    emitted: int = 0  # tokens reported so far
    end_id: int | None = None  # the end token that was reported; nothing after it will be
    reported: tuple[int, int] = (
        0,
        0,
    )  # finished blocks that were reported in full, and their steps

    # What the engine lent it.
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    pages_P: Tensor | None = None  # the same as a tensor
    nodes: "list[Node]" = field(default_factory=list)  # what the first pages may share with others
    uncond_pages: list[int] = field(default_factory=list)
    uncond_pages_P: Tensor | None = None
    memory: Memory | None = None  # of the decoder, for the current block
    masked_L: Tensor | None = None  # what is left of the current block; None where it is untouched
    top: tuple[Tensor, Tensor] | None = None  # most probable ids and log-probabilities of its final

    def __post_init__(self) -> None:
        block = self.policy.block_length
        self.seed = self.params.seed or 0
        self.prompt_len = len(self.prompt)
        self.anchor = 0 if self.block_causal else self.prompt_len
        self.limit = self.prompt_len + self.params.max_tokens
        self.blocks_stop = -(-self.limit // block) * block if self.block_causal else self.limit
        self.length = self.blocks_stop + len(self.suffix)
        self.first_block = (self.prompt_len - self.anchor) // block
        self.num_blocks = -(-(self.blocks_stop - self.anchor) // block) - self.first_block
        self.causal_block = block if self.block_causal else 0
        cfg_scale = self.policy.cfg_scale
        self.guided = cfg_scale > 0
        self.transforms = transforms_of(self.params, cfg_scale, self.end_ids, self.prompt_len)
        self._enter_block(self.index)

    @property
    def masked(self) -> Tensor:
        """Which positions of the current block are masked, on the host."""
        if self.masked_L is not None:
            return self.masked_L
        return torch.arange(self.start, self.stop) >= self.prompt_len

    @property
    def most_post_steps(self) -> int:
        """How many steps may follow after the current block's last mask is gone.

        Every step before that fills a mask, so a block takes at most twice as many steps as it has
        positions, or 32 more where it is short: work is bounded by the canvas.
        """
        return min(self.policy.decoder.settle_steps(), max(self.stop - self.start, _SHORT))

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

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the given and final tokens of [start, stop)."""
        given, written = self.prompt[start:stop], max(start - self.prompt_len, 0)
        return given + tuple(self.final[written : max(stop - self.prompt_len, 0)])

    def finish_block(self, ids: list[int]) -> None:
        """Record the current block's tokens as final and move to the next block."""
        self.final += ids[self.prompt_in_block :]
        self.clean_end = self.start
        self.steps_before += self.step
        self._enter_block(self.index + 1)

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
        self._enter_block(self.index)

    def resume(self, ids: Items[int], reported: tuple[int, int], forwards: int) -> None:
        """Stand where another stood that had reported these tokens, as after a rewind there."""
        self.reported = reported
        index, self.steps_before = reported
        self._enter_block(index)
        self.final = list(ids[: self.start - self.prompt_len]) if index else []
        self.emitted = len(ids)
        self.end_id = ids[-1] if ids and ids[-1] in self.end_ids else None
        self.forwards = forwards
        self.rewind()

    def _enter_block(self, index: int) -> None:
        block = self.policy.block_length
        self.index = index
        self.start = self.anchor + (self.first_block + index) * block
        self.stop = min(self.start + block, self.blocks_stop)
        self.kv_stop = self.stop if self.block_causal else self.length
        # Where its first position is decided before, a block reads nothing from before itself.
        shift = 0 if self.policy.iteration.first_alone else self.logit_shift
        self.read_start = max(self.start - shift, 0)
        self.prompt_in_block = max(self.prompt_len - self.start, 0)
        self.step = self.post_steps = 0
        self.memory = self.masked_L = self.top = None
