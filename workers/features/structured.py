"""Structured answers: an automaton accepts each block's tokens together.

Letters: B sequences, L positions of a block or a slot, N rows, G answers or slots.
"""

from collections import defaultdict
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.components.backend import send
from diffray.components.grammar.automata import Automata
from diffray.components.grammar.automaton import Automaton
from diffray.components.grammar.choose import SlotEnd, Structured, choose_together
from diffray.components.grammar.paths import Entry
from diffray.components.pinned_canvas import PinnedCanvas, Stretch
from diffray.components.propose import Chosen
from diffray.components.sequence import Sequence
from diffray.workers.draws import Draw, join_draws, joined
from diffray.workers.features.feature import Feature

if TYPE_CHECKING:
    from diffray.workers.head_plan import BlockRows, HeadPlan

# Rows that are equal in this are chosen in one call: whether they draw, slot ends, and about how
# many positions there are, because all are padded to the longest.
Alike = tuple[bool, SlotEnd | None, int]


class StructuredAnswers(Feature):
    """The rows of answers with an automaton."""

    fused = True

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.automaton is not None

    def plan_head(self, head: "HeadPlan") -> None:
        ours = head.blocks_of(self)
        for block in ours:
            head.claim(block)
        parts = [StructuredPart.of_answer(each, head.length) for each in ours]
        self.groups = joined_by_kind(parts, head.device)

    def needs_logits(self, head: "HeadPlan") -> bool:
        return True

    def choose(self, chosen: Chosen) -> None:
        for group in self.groups:
            choose_together(chosen, group)


class StructuredPart(NamedTuple):
    """Rows of a sequence that are chosen together, and their positions, on the host."""

    automaton: Automaton
    rows_N: Tensor
    places_N: Tensor  # of the rows, among the positions
    cells_L: Tensor  # of the positions: flat index into [B, L]
    valid_L: Tensor
    room: int
    state: int
    draw: Draw | None
    end: SlotEnd | None = None
    following: int = 0  # the token after a slot

    @staticmethod
    def of_answer(block: "BlockRows", length: int) -> "StructuredPart":
        """Return a block's part of an answer, padded to `length` positions."""
        sequence, automaton = block.sequence, block.sequence.automaton
        assert automaton is not None
        at_L = sequence.block.start + torch.arange(length)
        # A text that may be cut anywhere need not end within a growing canvas's max_tokens.
        cut = sequence.policy.canvas_length > 0 and not automaton.distance_Q.any()
        stop = sequence.block.stop if cut else min(sequence.block.stop, sequence.canvas.limit)
        return StructuredPart(
            automaton,
            block.rows_N,
            block.offsets_N,
            block.row * length + torch.arange(length),
            (at_L >= sequence.canvas.prompt_len) & (at_L < stop),
            max(sequence.canvas.limit - sequence.block.stop, 0),
            sequence.state,
            block.draw,
        )

    @staticmethod
    def of_slot(
        block: "BlockRows", length: int, canvas: PinnedCanvas, stretch: Stretch
    ) -> "StructuredPart":
        """Return a slot of a pinned canvas; tokens of each slot are chosen separately."""
        start = stretch.start - canvas.first_cell(block.sequence.block)  # in the block
        size = stretch.stop - stretch.start
        ours_N = (block.offsets_N >= start) & (block.offsets_N < start + size)
        rows_N, draw = block.rows_N[ours_N], block.draw
        return StructuredPart(
            stretch.slot.automaton,
            rows_N,
            block.offsets_N[ours_N] - start,
            block.row * length + start + torch.arange(size),
            torch.ones(size, dtype=torch.bool),
            stretch.room + 1,  # a value is followed by an end token, which has no position
            stretch.state,
            None if draw is None else draw._replace(rows=rows_N),
            SlotEnd(canvas.template.end_id, stretch.roomy),
            stretch.slot.following,
        )

    @property
    def alike(self) -> Alike:
        return self.draw is not None, self.end, ((len(self.cells_L) - 1) >> 3).bit_length()


def joined_by_kind(parts: Items[StructuredPart], device: torch.device) -> list[Structured]:
    """Return the rows of several sequences, joined where they are chosen in one call."""
    alike: dict[Alike, list[StructuredPart]] = defaultdict(list)
    for part in parts:
        alike[part.alike].append(part)
    return [_joined(each, device) for each in alike.values()]


def _joined(parts: Items[StructuredPart], device: torch.device) -> Structured:
    length = max(len(part.cells_L) for part in parts)
    entry = Entry(
        send(torch.tensor([part.state for part in parts]), device),
        send(pad_sequence([part.valid_L for part in parts], batch_first=True), device),
        send(torch.tensor([part.room for part in parts]), device),
    )
    counts = torch.tensor([len(part.rows_N) for part in parts])
    following = torch.tensor([part.following for part in parts])
    return Structured(
        Automata.join(tuple(part.automaton for part in parts), device),
        send(pad_sequence([part.cells_L for part in parts], batch_first=True), device),
        entry,
        joined([part.rows_N for part in parts], device),
        joined([g * length + part.places_N for g, part in enumerate(parts)], device),
        join_draws([part.draw for part in parts if part.draw is not None], device),
        parts[0].end,
        send(following.repeat_interleave(counts), device),
    )
