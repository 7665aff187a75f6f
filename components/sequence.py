"""One generation in progress: its request, its canvas, and how far it is."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from diffray.components.canvas import Canvas, OpenBlock
from diffray.components.copies import Copy
from diffray.components.drafted_canvas import DraftedCanvas
from diffray.components.grammar.automaton import Automaton
from diffray.components.images import Images
from diffray.components.iterations import Renoise
from diffray.components.lora import LoRA
from diffray.components.model_spec import ModelSpec
from diffray.components.pinned_canvas import Decided, PinnedCanvas
from diffray.components.row_transform import RowTransform
from diffray.components.speculation import DraftAcceptance
from diffray.components.transforms import transforms_of

if TYPE_CHECKING:
    from diffray.components.params import SamplingParams
    from diffray.components.policy import Policy
    from diffray.components.prefixes import Node

NO_IMAGES = Images()
_SHORT = 32  # a shorter block may take as many post-steps as one of this length


@dataclass(slots=True, eq=False)
class StoredKV:
    """A sequence's pages, and how much of what they store is final."""

    pages: list[int] = field(default_factory=list)
    pages_P: Tensor | None = None  # the same as a tensor
    nodes: "list[Node]" = field(default_factory=list)  # its first pages, which others may share
    clean_end: int = 0  # K/V before it were computed from final tokens
    cached: int = 0  # prompt tokens read from shared pages
    approximate: bool = False  # whether their K/V were computed on another canvas


@dataclass(slots=True, eq=False)
class Reported:
    """What updates have told of a sequence."""

    tokens: int = 0
    end_id: int | None = None  # the end token; nothing after it is reported
    progress: tuple[int, int] = (0, 0)  # blocks reported in full, and their steps


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one request, except what is on the device."""

    uid: int
    params: "SamplingParams"
    canvas: Canvas
    end_ids: frozenset[int]  # end tokens; empty if ignored
    watch: bool = False  # whether updates contain the canvas
    cache_salt: str = ""  # K/V are shared only within the same salt
    lora: LoRA | None = None  # the adapter that it runs with
    drafter: LoRA | None = None  # that of its masks, if they have their own
    automaton: Automaton | None = None  # that accepts the answer
    images: Images = NO_IMAGES  # in the prompt
    transforms: tuple[RowTransform, ...] = field(init=False)  # of its rows' logits, in order

    # How far it is. Finished blocks are on the canvas; the current one lives in the engine's slots.
    block: OpenBlock = field(init=False)
    steps_before: int = 0  # denoising steps of the blocks before it
    forwards: int = 0
    state: int = 0  # of the automaton, after the final tokens
    reported: Reported = field(default_factory=Reported)

    # What the engine has lent it.
    slot: int = -1
    kv: StoredKV = field(default_factory=StoredKV)
    uncond: Copy | None = None  # of a guided sequence: its canvas without prompt and suffix
    best: Copy | None = None  # of a canvas of noise: the most probable tokens so far
    copies: list[Copy] = field(default_factory=list)  # drafts, lent for a while
    acceptance: DraftAcceptance = field(default_factory=DraftAcceptance)  # of its drafts

    def __post_init__(self) -> None:
        self.transforms = transforms_of(self.params, self.end_ids, self.canvas.prompt_len)
        self._enter(0)

    @property
    def policy(self) -> "Policy":
        return self.canvas.policy

    @property
    def spec(self) -> ModelSpec:
        return self.canvas.spec

    @property
    def seed(self) -> int:
        """The request's seed; 0 without one, as engines draw no seeds."""
        return self.params.seed or 0

    @property
    def guided(self) -> bool:
        return self.policy.cfg_scale > 0

    @property
    def may_shrink(self) -> bool:
        """Whether the next step decides which positions of the block are used."""
        return self.canvas.may_shrink(self.block)

    @property
    def mirrors(self) -> list[Copy]:
        """Copies whose windows are always the sequence's own, with K/V of their own."""
        return [] if self.uncond is None else [self.uncond]

    @property
    def stored(self) -> list[StoredKV | Copy]:
        """What holds the pages of a canvas whose K/V are stored as a whole."""
        return [self.kv, *self.mirrors]

    @property
    def num_stored(self) -> int:
        """The number of `stored` once it runs."""
        return 2 if self.guided else 1

    @property
    def most_post_steps(self) -> int:
        """How many steps may follow the current block's last mask.

        Every earlier step fills a mask, so a block takes at most twice as many steps as it has
        positions, or 32 more if it is short: the canvas bounds the work.
        """
        return min(self.policy.decoder.settle_steps(), max(self.block.length, _SHORT))

    @property
    def most_steps(self) -> int:
        """How many steps the current block may take."""
        iteration = self.policy.iteration
        if isinstance(iteration, Renoise):
            return iteration.max_steps
        return self.block.length + self.most_post_steps + self.canvas.extra_steps(self.block)

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
        denoised = self.policy.encodes and self._denoises(start)
        return 0 if denoised or self.policy.pieces else self.policy.causal_length

    def _denoises(self, start: int) -> bool:
        """Return whether a window from here on denoises the block, if it does not encode it."""
        return start >= self.block.read_start and not self.block.verifies

    def adapters(self, start: int, stop: int) -> list[tuple[LoRA, range]]:
        """Return which adapter changes which positions of a window; drafts may have their own."""
        middle = min(max(start, self.block.adapted_start), stop)
        parts = [
            (self.stored_lora, range(start, middle)),
            (self.drafter or self.lora, range(middle, stop)),
        ]
        return [(lora, own) for lora, own in parts if lora is not None and own]

    @property
    def stored_lora(self) -> LoRA | None:
        """The adapter that stored K/V depend on."""
        return None if self.policy.iteration.adapts_drafts else self.lora

    def shift(self, *, alone: bool) -> int:
        """Return how far before a position the row about it is, in the next step."""
        if self.block.drafted:
            return int(self.block.verifies)
        return self.spec.first_shift if alone else self.spec.logit_shift

    def cut(self, length: int) -> None:
        """End a block after this many positions: its other drafts were wrong."""
        assert isinstance(self.canvas, DraftedCanvas), "no other canvas has drafts"
        self.canvas.cut(self.block, length)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split the final positions [start, stop) into the ranges that are encoded together."""
        if not self.policy.pieces:
            return self.images.pieces(start, stop)
        ends = [start]
        while ends[-1] < stop:
            ends.append(min(self.canvas.piece_end(ends[-1]), stop))
        return [*pairwise(ends)]

    @property
    def soft_span(self) -> tuple[int, int]:
        """The positions that have soft inputs: all, or only the block if each block resets them."""
        if self.policy.iteration.renoises:
            return self.block.start, self.block.stop
        return 0, self.canvas.most_length

    @property
    def in_last_block(self) -> bool:
        """Whether no block follows the current one; a canvas with an end token grows no further."""
        return self.canvas.is_last(self.block, ended=self.reported.end_id is not None)

    def finish_block(self, ids: list[int]) -> None:
        """Record the current block's tokens as final and move to the next block.

        Its own K/V are not clean: its last step ran while it still had masks.
        """
        block = self.block
        self._follow(ids[block.num_prompt : self.canvas.limit - block.start])
        self.canvas.final += ids[block.num_prompt :]
        if not block.drafted:
            self.kv.clean_end = block.start
        self.steps_before += block.step
        self._enter(block.index + 1)

    def shrink(self, ids: list[int], masked: list[bool], how: Decided) -> bool:
        """Remove positions of the block that turned out unused; return if there are any."""
        block, canvas = self.block, self.canvas
        assert isinstance(canvas, PinnedCanvas), "no other canvas shrinks"
        if not canvas.shrink(block, ids, masked, how):
            return False
        left = canvas.block_at(block.index)
        self.block = replace(left, step=block.step, post_steps=block.post_steps)
        self._skip_literals()
        return True

    def rewind(self) -> None:
        """Go back to the last point from which a restart is exact.

        That is the start of the current block, because decoder memories and approximate caches
        start over with each block. Soft embeddings cross blocks, and a pinned canvas has shrunk, so
        such a generation starts over and produces the same tokens.
        """
        index = self.block.index
        if self.restarts:
            index = self.steps_before = self.state = 0
            self.canvas.restart()
        self.kv.clean_end = self.canvas.num_drafts = 0
        self._enter(index)

    @property
    def restarts(self) -> bool:
        """Whether it starts over after an interruption."""
        iteration = self.policy.iteration
        soft = iteration.soft and not iteration.renoises
        return soft or self.canvas.shrinks

    def resume(self, ids: Items[int], progress: tuple[int, int], forwards: int) -> None:
        """Continue from these reported tokens, as if after a rewind on the other engine."""
        index, self.steps_before = progress
        if isinstance(self.canvas, DraftedCanvas):
            self.canvas.final = list(ids)
        self._enter(index)
        written = max(self.block.start - self.canvas.prompt_len, 0) if index else 0
        self.canvas.final = list(ids[:written])
        self.state = 0
        self._follow(self.canvas.final)
        end_id = ids[-1] if ids and ids[-1] in self.end_ids else None
        self.reported = Reported(len(ids), end_id, progress)
        self.forwards = forwards
        self.rewind()

    def _follow(self, ids: Items[int]) -> None:
        if self.automaton is not None:
            self.state = self.automaton.follow(self.state, ids)

    def _enter(self, index: int) -> None:
        self.block = self.canvas.open(index)
        for copy in self.copies:
            copy.ready = False
        self._skip_literals()

    def _skip_literals(self) -> None:
        """Skip a block without masks, unless it is the last."""
        block, canvas = self.block, self.canvas
        if not isinstance(canvas, PinnedCanvas):
            return
        if block.index + 1 >= canvas.num_blocks or bool(block.masked.any()):
            return
        given = canvas.given(canvas.prompt_len + len(canvas.final), block.stop)
        canvas.final += [token for token in given if token is not None]
        if block.step:  # the block's first step stored the K/V before it
            self.kv.clean_end = block.start
        self.steps_before += block.step
        self._enter(block.index + 1)
