"""One generation in progress: its state, and the arithmetic of its blocks.

    0          prompt_len     start        stop         blocks_stop    length
    |--- prompt ---|--- final ---|- current -|---- masks ----|-- suffix --|
    |--- K/V from final tokens ---|                clean_end <= start (block-causal models)

Blocks are cut from `anchor`: the end of the prompt or, for block-causal models, the start of the
block of attention in which it ends, so their first block may start inside the prompt. If final
tokens are encoded (a separate causal pass stores their K/V), blocks start after the prompt too.

A growing canvas (`Policy.canvas_length`) of a bidirectional model has whole blocks; when all are
finished without an end token, as many are added. The last block of a fixed one is cut short at
prompt + max_tokens, where a suffix may follow; a block-causal canvas has no suffix, and is rounded
up to whole blocks. A pinned canvas (`Pins`) has masks only in its slots, ends with the last of
them, and shrinks. It is one block, which may be longer than those of attention
(`Policy.causal_length`).
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffray.components.copies import Copy
from diffray.components.grammar.automaton import Automaton
from diffray.components.images import Images
from diffray.components.iterations import Renoise
from diffray.components.lora import LoRA
from diffray.components.pins import Decided, Pins, Stretch
from diffray.components.row_transform import RowTransform
from diffray.components.speculation import Chance
from diffray.components.transforms import transforms_of
from diffray.kernels.credit import Memory

if TYPE_CHECKING:
    from diffray.components.params import SamplingParams
    from diffray.components.policy import Policy
    from diffray.components.prefixes import Node

NO_IMAGES = Images()
_SHORT = 32  # a shorter block may take as many post-steps as one of this length


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one request, except what is on the device."""

    uid: int
    prompt: tuple[int, ...]
    params: "SamplingParams"
    policy: "Policy"
    block_causal: bool
    end_ids: frozenset[int]  # end tokens; empty if ignored
    logit_shift: int = 0
    encodes: bool = False  # a separate causal pass stores the K/V of final tokens
    context: int = 2**62  # positions that a growing canvas may have
    suffix: tuple[int, ...] = ()
    watch: bool = False  # whether updates contain the canvas
    cache_salt: str = ""  # K/V are shared only within the same salt
    lora: LoRA | None = None  # the adapter that it runs with
    automaton: Automaton | None = None  # that accepts the answer
    pins: Pins | None = None  # the given parts of the answer
    images: Images = NO_IMAGES  # in the prompt

    # Its canvas, all of it ...
    seed: int = field(init=False)  # 0 without one: engines draw no seeds
    prompt_len: int = field(init=False)
    anchor: int = field(init=False)
    limit: int = field(init=False)  # the end of the requested tokens
    blocks_stop: int = field(init=False)  # the end of the last block
    length: int = field(init=False)
    num_blocks: int = field(init=False)  # blocks of the generation
    added_blocks: int = field(init=False)  # by which a growing canvas grows; all of another
    index_in_canvas: int = field(init=False)  # the block's number among those added together ...
    blocks_in_canvas: int = field(init=False)  # ... and how many these are
    causal_block: int = field(init=False)  # block length of final tokens' attention; 0: both ways
    guided: bool = field(init=False)
    transforms: tuple[RowTransform, ...] = field(init=False)  # of its rows' logits, in order
    # ... and the current block.
    start: int = field(init=False)
    stop: int = field(init=False)
    kv_stop: int = field(init=False)  # the end of the keys that it sees
    read_start: int = field(init=False)  # the first position that the block's logits come from
    prompt_in_block: int = field(init=False)  # positions of the prompt at its start

    # Progress. Finished blocks are in `final`; the current block lives in the engine's slots.
    index: int = 0  # blocks finished
    step: int = 0  # denoising steps of the current block
    post_steps: int = 0  # those of them after the last mask
    steps_before: int = 0  # denoising steps of the blocks before it
    clean_end: int = 0
    cached: int = 0  # prompt tokens read from shared pages
    approximate: bool = False  # whether their K/V were computed on another canvas
    forwards: int = 0
    final: list[int] = field(default_factory=list)
    emitted: int = 0  # tokens reported so far
    state: int = 0  # of the automaton, after `final`
    end_id: int | None = None  # the reported end token; nothing after it is reported
    reported: tuple[int, int] = (
        0,
        0,
    )  # blocks reported in full, and their steps

    # Resources lent by the engine.
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    pages_P: Tensor | None = None  # the same as a tensor
    nodes: "list[Node]" = field(default_factory=list)  # its first pages, which others may share
    uncond: Copy | None = None  # of a guided sequence: its canvas without prompt and suffix
    best: Copy | None = None  # of a canvas of noise: the most probable tokens so far
    drafts: list[Copy] = field(default_factory=list)  # one, two ... steps ahead, or branches
    chance: Chance = field(default_factory=Chance)  # that a draft is right
    memory: Memory | None = None  # of the current block, if its decoder gives credit
    masked_L: Tensor | None = None  # masks left in the current block; None: not started
    top: tuple[Tensor, Tensor] | None = None  # ids and log-probabilities of its `final`

    def __post_init__(self) -> None:
        causal = self.policy.causal_length
        self.seed = self.params.seed or 0
        self.prompt_len = len(self.prompt)
        self.causal_block = (1 if self.encodes else causal) if self.block_causal else 0
        self.anchor = self.prompt_len
        if self.block_causal and not self.encodes:
            self.anchor -= self.prompt_len % causal
        self._end_canvas()
        cfg_scale = self.policy.cfg_scale
        self.guided = cfg_scale > 0
        self.transforms = transforms_of(self.params, cfg_scale, self.end_ids, self.prompt_len)
        self._enter_block(self.index)

    @property
    def masked(self) -> Tensor:
        """Which positions of the current block are masked, on the host."""
        if self.masked_L is not None:
            return self.masked_L
        if self.pins is not None:
            return torch.tensor([token is None for token in self.given(self.start, self.stop)])
        return torch.arange(self.start, self.stop) >= self.prompt_len

    def given(self, start: int, stop: int) -> list[int | None]:
        """Return the tokens of [start, stop) on the canvas, with None where masks were at first.

        So tokens that became final in the current block are None too.
        """
        canvas: list[int | None] = [*self.prompt, *self.final]
        if self.pins is not None:
            canvas += self.pins.shown[len(self.final) :]
        canvas += [None] * (self.blocks_stop - len(canvas))
        return [*canvas[: self.blocks_stop], *self.suffix][start:stop]

    @property
    def stretches(self) -> list[Stretch]:
        """The slots in the current block of a pinned canvas."""
        if self.pins is None:
            return []
        return self.pins.stretches(
            self.start - self.prompt_len, self.stop - self.prompt_len, self.final
        )

    @property
    def measures(self) -> bool:
        """Whether the next step decides which positions of the block's slots are used."""
        return any(stretch.roomy for stretch in self.stretches)

    @property
    def first_alone(self) -> bool:
        """Whether the current block's first step decides its first position and no other."""
        alone = self.policy.iteration.first_alone and self.start >= self.prompt_len
        return alone and (self.logit_shift > 0 or not self.block_causal)

    @property
    def most_post_steps(self) -> int:
        """How many steps may follow the current block's last mask.

        Every earlier step fills a mask, so a block takes at most twice as many steps as it has
        positions, or 32 more if it is short: the canvas bounds the work.
        """
        return min(self.policy.decoder.settle_steps(), max(self.stop - self.start, _SHORT))

    @property
    def most_steps(self) -> int:
        """How many steps the current block may take."""
        iteration = self.policy.iteration
        if isinstance(iteration, Renoise):
            return iteration.max_steps
        return self.stop - self.start + self.most_post_steps + len(self.stretches)

    def temperature(self, step: int) -> float:
        """Return the temperature of the distributions at a step of the block; greedy is like 1."""
        asked = self.params.temperature if self.params.draws else 1.0
        return self.policy.iteration.temperature(step, asked)

    def causal_at(self, start: int) -> int:
        """Return the block length of attention for a window from here on; 0: both ways.

        -1 also means both ways, within an image: there each position counts its reach from itself.
        """
        if self.images.at(start) is not None:
            return -1
        return 0 if self.encodes and start >= self.start else self.causal_block

    @property
    def soft_span(self) -> tuple[int, int]:
        """The positions that have soft inputs: all, or only the block if each block resets them."""
        return (self.start, self.stop) if self.policy.iteration.renoises else (0, self.most_length)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the prompt and final tokens of [start, stop)."""
        given, written = self.prompt[start:stop], max(start - self.prompt_len, 0)
        return given + tuple(self.final[written : max(stop - self.prompt_len, 0)])

    def finish_block(self, ids: list[int]) -> None:
        """Record the current block's tokens as final and move to the next block."""
        self._follow(ids[self.prompt_in_block : self.limit - self.start])
        self.final += ids[self.prompt_in_block :]
        self.clean_end = self.start
        self.steps_before += self.step
        self._enter_block(self.index + 1)

    def rewind(self) -> None:
        """Go back to the last point from which a restart is exact.

        That is the start of the current block, because decoder memories and approximate caches
        start over with each block. Soft embeddings cross blocks, and a pinned canvas has shrunk, so
        such a generation starts over and produces the same tokens.
        """
        if self.restarts:
            self.index = self.steps_before = self.state = 0
            self.final = []
            if self.pins is not None:
                self.pins.restart()
                self._end_canvas()
        self.clean_end = 0
        self._enter_block(self.index)

    @property
    def restarts(self) -> bool:
        """Whether it starts over after an interruption."""
        iteration = self.policy.iteration
        return (iteration.soft and not iteration.renoises) or self.pins is not None

    def measured(self, ids: list[int], masked: list[bool], block: Decided) -> bool:
        """Remove the positions of the block's slots that turned out unused; return if any did.

        They have end tokens. Other decided tokens stay.
        """
        assert self.pins is not None
        first, stretches = self.start - self.prompt_len, self.stretches
        self.pins.measured |= {stretch.number for stretch in stretches}
        cells = [at for each in stretches for at in range(each.start, each.stop)]
        decided = {at: ids[at - first] for at in cells if not masked[at - first]}
        unused = {at for at, token in decided.items() if token == self.pins.canvas.end_id}
        if not unused:
            return False
        self.pins.note(first, block)
        kept = {at: token for at, token in decided.items() if at not in unused}
        self.pins.contract(stretches, unused, kept)
        self._end_canvas()
        self._end_block()
        self.memory = self.masked_L = self.top = None
        self._skip_literals()
        return True

    def resume(self, ids: Items[int], reported: tuple[int, int], forwards: int) -> None:
        """Continue from these reported tokens, as if after a rewind on the other engine."""
        self.reported = reported
        index, self.steps_before = reported
        self._enter_block(index)
        self.final = list(ids[: self.start - self.prompt_len]) if index else []
        self.state = 0
        self._follow(self.final)
        self.emitted = len(ids)
        self.end_id = ids[-1] if ids and ids[-1] in self.end_ids else None
        self.forwards = forwards
        self.rewind()

    def _follow(self, ids: Items[int]) -> None:
        if self.automaton is not None:
            self.state = self.automaton.follow(self.state, ids)

    @property
    def in_last_block(self) -> bool:
        """Whether no block follows the current one; a canvas with an end token grows no further."""
        ended = self.end_id is not None and self.index_in_canvas + 1 == self.blocks_in_canvas
        return ended or self.index + 1 == self.num_blocks

    @property
    def most_length(self) -> int:
        """The positions that its canvas may have in the end."""
        return self._grown(self.num_blocks - 1) if self.policy.canvas_length else self.length

    def _grown(self, index: int) -> int:
        """Return where a growing canvas ends while its block `index` is denoised."""
        blocks = (index // self.added_blocks + 1) * self.added_blocks
        return min(self.anchor + blocks * self.policy.block_length, self.context)

    def _end_canvas(self) -> None:
        """Set where the canvas and its blocks end."""
        block, pins, added = self.policy.block_length, self.pins, self.policy.canvas_length
        self.limit = stop = self.prompt_len + self.params.max_tokens
        if pins is not None:  # the literals after its last slot take no part
            self.limit = self.prompt_len + len(pins.cells)
            stop = self.prompt_len + max(pins.slots_stop, len(self.final) + 1)
        self.num_blocks = -(-(stop - self.anchor) // block)
        self.added_blocks = -(-added // block) or self.num_blocks
        whole = self.anchor + self.num_blocks * block
        self.blocks_stop = whole if self.block_causal and pins is None else stop
        if added:
            self.blocks_stop = self._grown(self.index)
        self.length = self.blocks_stop + len(self.suffix)
        before = self.index - self.index % self.added_blocks
        self.blocks_in_canvas = -(-(self.blocks_stop - self.anchor) // block) - before

    def _enter_block(self, index: int) -> None:
        block = self.policy.block_length
        self.index = index
        if self.pins is not None:
            self.pins.enter_block()
        if self.policy.canvas_length:
            self._end_canvas()
        self.index_in_canvas = index % self.added_blocks
        self.start = self.anchor + index * block
        # If its first position is decided in advance, a block reads nothing before its start.
        decided = self.first_alone and not self.policy.decoder.edits
        shift = 0 if decided else self.logit_shift
        self.read_start = max(self.start - shift, 0)
        self.prompt_in_block = max(self.prompt_len - self.start, 0)
        self.step = self.post_steps = 0
        self.memory = self.masked_L = self.top = None
        for draft in self.drafts:
            draft.ready = False
        self._end_block()
        self._skip_literals()

    def _end_block(self) -> None:
        self.stop = min(self.start + self.policy.block_length, self.blocks_stop)
        self.kv_stop = self.stop if self.block_causal else self.length

    def _skip_literals(self) -> None:
        """Skip a block without masks, unless it is the last."""
        if self.pins is None or self.index + 1 >= self.num_blocks or bool(self.masked.any()):
            return
        given = self.given(self.prompt_len + len(self.final), self.stop)
        self.final += [token for token in given if token is not None]
        if self.step:  # the block's first step stored the K/V before it
            self.clean_end = self.start
        self.steps_before += self.step
        self._enter_block(self.index + 1)
