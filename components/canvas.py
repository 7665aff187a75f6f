"""The canvas of a generation: its positions, its blocks, and the tokens that are final.

    0          prompt_len    block.start   block.stop   blocks_stop    length
    |--- prompt ---|--- final ---|- current -|---- masks ----|-- suffix --|

Blocks are cut from `anchor`: the end of the prompt or, for block-causal models, the start of the
block of attention in which it ends, so their first block may start inside the prompt. If final
tokens are encoded (a separate pass stores their K/V), blocks start after the prompt too.

A growing canvas (`Policy.canvas_length`) of a bidirectional model has whole blocks; when all are
finished without an end token, as many are added. The last block of a fixed one is cut short at
prompt + max_tokens, where a suffix may follow; a block-causal canvas has no suffix, and is rounded
up to whole blocks unless it is fixed and encoded in pieces.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from diffray.components.model_spec import ModelSpec
from diffray.kernels.credit import Memory

if TYPE_CHECKING:
    from diffray.components.policy import Policy


@dataclass(slots=True, eq=False)
class OpenBlock:
    """The block that is being denoised: where it is, and its state, except what is on the device.

    Before its first step `masked` has all its masks.
    """

    index: int  # blocks before it
    start: int
    stop: int
    kv_stop: int  # the end of the keys that it sees
    read_start: int  # the first position that its logits come from
    first_alone: bool  # whether its first step decides its first position and no other
    num_prompt: int  # positions of the prompt at its start
    masked: Tensor  # masks left, on the host
    drafted: bool = False  # whether its tokens are drafts until they are verified
    num_drafts: int = 0  # how many, from its start
    step: int = 0  # denoising steps so far
    post_steps: int = 0  # those of them after the last mask
    memory: Memory | None = None  # if its decoder gives credit
    top: tuple[Tensor, Tensor] | None = None  # ids and log-probabilities of its final tokens

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def verifies(self) -> bool:
        """Whether the next step verifies drafts."""
        return self.drafted and not self.masked[: self.num_drafts].any()

    @property
    def adapted_start(self) -> int:
        """The first token of a step that an adapter of drafts changes."""
        return self.start + self.num_drafts if self.verifies else self.read_start

    @property
    def final_stop(self) -> int:
        """The end of the positions whose final K/V are stored by its first step or before."""
        return self.start - self.drafted


@dataclass(eq=False)
class Canvas:
    """A canvas whose answer is masks at first; `PinnedCanvas` is the other kind."""

    shrinks: ClassVar[bool] = False  # whether steps may remove positions
    prompt: tuple[int, ...]
    suffix: tuple[int, ...]
    max_tokens: int
    policy: "Policy"
    spec: ModelSpec
    context: int  # the most positions that it may have
    answer: tuple[int, ...] = field(init=False, default=())  # if it is given
    final: list[int] = field(init=False, default_factory=list)  # tokens of finished blocks
    num_drafts: int = field(init=False, default=0)  # on the device, behind the final tokens
    overhead: float = field(init=False, default=math.inf)  # its share of a forward's, in positions
    prompt_len: int = field(init=False)
    anchor: int = field(init=False)
    limit: int = field(init=False)  # the end of the requested tokens
    blocks_stop: int = field(init=False)  # the end of the last block
    num_blocks: int = field(init=False)  # blocks of the generation
    added_blocks: int = field(init=False)  # blocks added at a time; of one that does not grow, all

    def __post_init__(self) -> None:
        self.prompt_len = self.anchor = len(self.prompt)
        if self.policy.causal_length and not self.policy.encodes:
            self.anchor -= self.prompt_len % self.policy.causal_length
        self.set_end(0)

    @property
    def length(self) -> int:
        return self.blocks_stop + len(self.suffix)

    @property
    def starts_masked(self) -> bool:
        """Whether it is masks between prompt and suffix before its first step."""
        return not self.shrinks

    @property
    def most_length(self) -> int:
        """The positions that it may have in the end."""
        return self._grown(self.num_blocks - 1) if self.policy.canvas_length else self.length

    def shown(self) -> list[int | None]:
        """Return the answer's known tokens, with None at masks between them."""
        return [*self.final]

    def given(self, start: int, stop: int) -> list[int | None]:
        """Return the tokens of [start, stop), with None at masks.

        The current block is as it was at its start: what became final in it is on the device.
        """
        canvas = [*self.prompt, *self.shown()]
        canvas += [None] * (self.blocks_stop - len(canvas))
        return [*canvas[: self.blocks_stop], *self.suffix][start:stop]

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the prompt and final tokens of [start, stop)."""
        given, written = self.prompt[start:stop], max(start - self.prompt_len, 0)
        return given + tuple(self.final[written : max(stop - self.prompt_len, 0)])

    def piece_end(self, position: int) -> int:
        """Return the end of the piece in which a final position is encoded."""
        policy = self.policy
        length = policy.pieces if position < self.prompt_len else policy.causal_length
        return position + 1 + (self.prompt_len - position - 1) % length

    def open(self, index: int) -> OpenBlock:
        """Return a block that is about to be denoised; the canvas may grow for it."""
        if self.policy.canvas_length:
            self.set_end(index)
        return self.block_at(index)

    def block_at(self, index: int) -> OpenBlock:
        """Return a block of the canvas as it is."""
        start = self.anchor + index * self.policy.block_length
        # A request that exceeds the context has a canvas, and this block, before it is refused.
        stop = min(start + self.policy.block_length, self.blocks_stop, self.context)
        stop = max(stop, start)
        causal, shift = self.policy.causal_length > 0, self.spec.logit_shift
        first_alone = self.policy.iteration.first_alone and start >= self.prompt_len
        first_alone = first_alone and (self.spec.first_shift > 0 or not causal)
        # If its first position is decided in advance, a block reads nothing before its start.
        decided = first_alone and not self.policy.decoder.edits
        return OpenBlock(
            index=index,
            start=start,
            stop=stop,
            kv_stop=stop if causal else self.length,
            read_start=max(start - (0 if decided else shift), 0),
            first_alone=first_alone,
            num_prompt=max(self.prompt_len - start, 0),
            masked=self.masks(start, stop),
        )

    def masks(self, start: int, stop: int) -> Tensor:
        """Return which positions of a block are masked before its first step."""
        if start >= self.prompt_len:
            return torch.ones(stop - start, dtype=torch.bool)
        return torch.arange(start, stop) >= self.prompt_len

    def restart(self) -> None:
        """Forget all that became final."""
        self.final = []

    def may_shrink(self, block: OpenBlock) -> bool:
        """Whether the block's next step decides which of its positions are used."""
        return False

    def extra_steps(self, block: OpenBlock) -> int:
        """How many steps a block may take beside those for its masks."""
        return 0

    def is_last(self, block: OpenBlock, *, ended: bool) -> bool:
        """Return whether no block follows; a canvas with an end token grows no further."""
        number, count = self.place_of(block.index)
        return (ended and number + 1 == count) or block.index + 1 == self.num_blocks

    def place_of(self, index: int) -> tuple[int, int]:
        """Return a block's number among those added with it, and how many these are."""
        number, block = index % self.added_blocks, self.policy.block_length
        return number, -(-(self.blocks_stop - self.anchor) // block) - (index - number)

    def set_end(self, index: int) -> None:
        """Set where the canvas and its blocks end while block `index` is denoised."""
        block, added = self.policy.block_length, self.policy.canvas_length
        self.limit = self.prompt_len + self.max_tokens
        self.num_blocks = -(-(self.limit - self.anchor) // block)
        self.added_blocks = -(-added // block) or self.num_blocks
        whole = self.anchor + self.num_blocks * block
        is_whole = self.policy.causal_length > 0 and not self.policy.fixed
        self.blocks_stop = whole if is_whole else self.limit
        if added:
            self.blocks_stop = self._grown(index)

    def _grown(self, index: int) -> int:
        """Return where a growing canvas ends while its block `index` is denoised."""
        blocks = (index // self.added_blocks + 1) * self.added_blocks
        return min(self.anchor + blocks * self.policy.block_length, self.context)
