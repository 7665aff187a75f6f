"""A pinned canvas: its remaining positions, and how its slots were decided.

It has masks only in its slots, ends with the last of them, and shrinks. It is one block, which may
be longer than those of attention (`Policy.causal_length`), unless the request names a length.

Cells are counted from the end of the prompt. A slot is measured when its block starts: the model
predicts how much of it a value takes, and the positions after that are removed from the canvas.
Then the slot is filled.
"""

import itertools
import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from diffray.components.canvas import Canvas, OpenBlock
from diffray.components.grammar.template import Slot, Template


class Stretch(NamedTuple):
    """The cells of a slot that are in a block."""

    number: int
    slot: Slot
    start: int
    stop: int
    room: int  # cells of the slot after them
    state: int  # of its automaton, before them
    roomy: bool  # whether it may have unused positions

    @property
    def whole(self) -> bool:
        """Whether it covers a whole choice, so that the options can be compared."""
        return bool(self.slot.tokens) and self.room == 0 and self.state == 0

    @property
    def asked(self) -> list[list[int]]:
        """The tokens that matter at each cell of a choice: the one after it, then each option's."""
        return [
            [self.slot.following, *(ids[at] if at < len(ids) else 0 for ids in self.slot.tokens)]
            for at in range(self.stop - self.start)
        ]

    def scores(self, logprobs: list[list[float]]) -> list[float]:
        """Return the log-probability of each option, with its end; -inf where it does not fit."""
        size, found = self.stop - self.start, []
        for number, ids in enumerate(self.slot.tokens, 1):
            score = sum(logprobs[at][number] for at in range(min(len(ids), size)))
            if len(ids) < size:
                score += logprobs[len(ids)][0] if self.roomy else -math.inf
            found.append(score if len(ids) <= size else -math.inf)
        return found


class Note(NamedTuple):
    """How a cell of a slot was decided."""

    step: int
    logprob: float
    ranking: list[tuple[int, float]]


LITERAL = Note(0, 0.0, [])


class Decided(Protocol):
    """How a block was decided."""

    @property
    def steps(self) -> list[int]: ...

    @property
    def logprobs(self) -> list[float]: ...

    @property
    def top(self) -> list[list[tuple[int, float]]]: ...


@dataclass(eq=False)
class PinnedCanvas(Canvas):
    """The cells of one answer, from the first to the last."""

    shrinks: ClassVar[bool] = True

    template: Template
    cells: list[int] = field(init=False)
    measured: set[int] = field(init=False)  # slots of the current block
    decided: dict[int, int] = field(init=False)  # tokens of its cells at the last `_contract`
    notes: dict[int, Note] = field(init=False)  # of decided cells
    shares: dict[int, list[float]] = field(init=False)  # probabilities of options, by slot

    def __post_init__(self) -> None:
        self._begin()
        super().__post_init__()

    def restart(self) -> None:
        super().restart()
        self._begin()
        self.set_end(0)

    def _begin(self) -> None:
        self.cells = list(self.template.cells)
        self.notes, self.shares = {}, {}
        self.measured, self.decided = set(), {}

    def open(self, index: int) -> OpenBlock:
        self.measured, self.decided = set(), {}
        return self.block_at(index)

    def set_end(self, index: int) -> None:
        """Set where it ends: the literals after its last slot take no part."""
        self.limit = self.prompt_len + len(self.cells)
        self.blocks_stop = self.prompt_len + max(slots_stop(self.cells), len(self.final) + 1)
        blocks = -(-(self.blocks_stop - self.anchor) // self.policy.block_length)
        self.num_blocks = self.added_blocks = blocks

    def shown(self) -> list[int | None]:
        """Return the answer, without tokens decided since the last `_contract`."""
        cells = enumerate(self.cells)
        shown = [self.decided.get(at) if cell < 0 else cell for at, cell in cells]
        return [*self.final, *shown[len(self.final) :]]

    def masks(self, start: int, stop: int) -> Tensor:
        return torch.tensor([token is None for token in self.given(start, stop)])

    def first_cell(self, block: OpenBlock) -> int:
        """Return the cell at which a block starts; below 0 if it starts inside the prompt."""
        return block.start - self.prompt_len

    def stretches(self, block: OpenBlock) -> list[Stretch]:
        """Return the slots with cells in a block."""
        found, at = [], max(self.first_cell(block), 0)
        for cell, same in groupby(self.cells[at : block.stop - self.prompt_len]):
            begin, at = at, at + len(list(same))
            if cell >= 0:
                continue
            slot = self.template.slots[-1 - cell]
            before = self.cells[:begin].count(cell)
            written = self.final[begin - before : begin]
            state = slot.automaton.follow(0, written) if before else 0
            room = self.cells[at:].count(cell)
            least = int(slot.automaton.distance_Q[state]) - 1
            roomy = -1 - cell not in self.measured and least < at - begin + room
            found.append(Stretch(-1 - cell, slot, begin, at, room, state, roomy))
        return found

    def may_shrink(self, block: OpenBlock) -> bool:
        return any(stretch.roomy for stretch in self.stretches(block))

    def extra_steps(self, block: OpenBlock) -> int:
        return len(self.stretches(block))

    def shrink(self, block: OpenBlock, ids: list[int], masked: list[bool], how: Decided) -> bool:
        """Remove the positions of the block's slots that turned out unused; return if any did.

        They have end tokens. Other decided tokens stay.
        """
        first, stretches = self.first_cell(block), self.stretches(block)
        self.measured |= {stretch.number for stretch in stretches}
        cells = [at for each in stretches for at in range(each.start, each.stop)]
        decided = {at: ids[at - first] for at in cells if not masked[at - first]}
        unused = {at for at, token in decided.items() if token == self.template.end_id}
        if not unused:
            return False
        self.note(first, how)
        self._contract(stretches, unused, decided)
        self.set_end(block.index)
        return True

    def _contract(
        self, stretches: Items[Stretch], unused: set[int], decided: Mapping[int, int]
    ) -> None:
        """Remove unused cells, and what follows of slots that end in one.

        `decided` maps cells to their tokens; those that are left stay.
        """
        gone = set(unused)
        for stretch in stretches:
            if stretch.stop - 1 in gone:
                gone |= set(range(stretch.stop, stretch.stop + stretch.room))
        left = [at for at in range(len(self.cells)) if at not in gone]
        place = {at: number for number, at in enumerate(left)}
        self.cells = [self.cells[at] for at in left]
        self.notes = {place[at]: note for at, note in self.notes.items() if at in place}
        self.decided = {place[at]: token for at, token in decided.items() if at in place}

    def weigh(self, stretch: Stretch, logprobs: list[list[float]]) -> None:
        """Record the probabilities of a choice's options, from the log-probabilities at its cells.

        Measuring compares all options. Later only those of the right length are compared, and they
        divide the probability that they had together.
        """
        scores = stretch.scores(logprobs)
        fits = [score > -math.inf for score in scores]
        if not any(fits):
            return
        best = max(scores)
        weights = [math.exp(score - best) for score in scores]
        before = self.shares.get(stretch.number)
        known = 1.0 if before is None else sum(itertools.compress(before, fits))
        self.shares[stretch.number] = [
            known * weight / sum(weights) if fit else other
            for fit, weight, other in zip(fits, weights, before or [0.0] * len(fits), strict=True)
        ]

    def fields(self, ids: Items[int]) -> dict[str, tuple[float, dict[str, float]]]:
        """Return the probability of each field of a complete answer, and of a choice's options."""
        found = {}
        for number, slot in enumerate(self.template.slots):
            at = [cell for cell, kind in enumerate(self.cells) if kind == -1 - number]
            likely = math.exp(sum(self.notes.get(cell, LITERAL).logprob for cell in at))
            shares = self.shares.get(number, [])
            options = dict(zip(slot.options, shares, strict=False))
            for tokens, share in zip(slot.tokens, shares, strict=False):
                if tokens == tuple(ids[cell] for cell in at):
                    likely = share
            found[slot.path] = likely, options
        return found

    def note(self, first: int, block: Decided) -> None:
        """Record how the slots' cells in a block were decided; the block starts at `first`."""
        rankings = block.top or [[]] * len(block.steps)
        for at, note in enumerate(zip(block.steps, block.logprobs, rankings, strict=True), first):
            if 0 <= at < len(self.cells) and self.cells[at] < 0 and at not in self.decided:
                self.notes[at] = Note(*note)


def slots_stop(cells: Items[int]) -> int:
    """Return the end of the last slot's cells."""
    return max((at + 1 for at, cell in enumerate(cells) if cell < 0), default=0)
