"""The rows that draw, and those that are chosen together, of one request and of a batch.

Letters: B sequences, L positions of a block or a slot, N rows.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.components.backend import send
from diffray.components.grammar.automata import Automata
from diffray.components.grammar.automaton import Automaton
from diffray.components.grammar.paths import Entry
from diffray.components.pinned_canvas import Stretch
from diffray.components.propose import Draws, SlotEnd, Structured
from diffray.components.sequence import Sequence
from diffray.components.slot_values import Values

# Rows that are equal in this are chosen in one call: whether they draw, slot ends, and about how
# many positions there are, because all are padded to the longest.
Alike = tuple[bool, SlotEnd | None, int]


class Draw(NamedTuple):
    """A sequence's rows that draw, and how."""

    rows: Tensor
    temperature: float
    top_k: int
    top_p: float
    min_p: float


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
    def of_answer(
        number: int,
        sequence: Sequence,
        length: int,
        rows_N: Tensor,
        offsets_N: Tensor,
        draw: Draw | None,
    ) -> "StructuredPart":
        """Return a block's part of an answer, padded to `length` positions."""
        automaton = sequence.automaton
        assert automaton is not None
        at_L = sequence.block.start + torch.arange(length)
        # A text that may be cut anywhere need not end within a growing canvas's max_tokens.
        cut = sequence.policy.canvas_length > 0 and not automaton.distance_Q.any()
        stop = sequence.block.stop if cut else min(sequence.block.stop, sequence.canvas.limit)
        return StructuredPart(
            automaton,
            rows_N,
            offsets_N,
            number * length + torch.arange(length),
            (at_L >= sequence.canvas.prompt_len) & (at_L < stop),
            max(sequence.canvas.limit - sequence.block.stop, 0),
            sequence.state,
            draw,
        )

    @staticmethod
    def of_slot(
        stretch: Stretch,
        first: int,
        end: SlotEnd,
        rows_N: Tensor,
        offsets_N: Tensor,
        draw: Draw | None,
    ) -> "StructuredPart":
        """Return a slot; its sequence's block starts at cell `first`, and at 0 in [B, L]."""
        ours_N = (offsets_N >= stretch.start - first) & (offsets_N < stretch.stop - first)
        return StructuredPart(
            stretch.slot.automaton,
            rows_N[ours_N],
            offsets_N[ours_N] - (stretch.start - first),
            torch.arange(stretch.start - first, stretch.stop - first),
            torch.ones(stretch.stop - stretch.start, dtype=torch.bool),
            stretch.room + 1,  # a value is followed by an end token, which has no position
            stretch.state,
            None if draw is None else draw._replace(rows=rows_N[ours_N]),
            end,
            stretch.slot.following,
        )

    @property
    def alike(self) -> Alike:
        return self.draw is not None, self.end, ((len(self.cells_L) - 1) >> 3).bit_length()


def join_draws(parts: Items[Draw], device: torch.device) -> Draws | None:
    """Return how all these rows draw; None if there are none."""
    if not parts:
        return None

    def each(name: str, dtype: torch.dtype) -> Tensor:
        return repeated([(part.rows, getattr(part, name)) for part in parts], dtype, device)

    real = torch.float64
    return Draws(
        joined([part.rows for part in parts], device),
        each("temperature", real),
        each("top_k", torch.long) if any(part.top_k > 0 for part in parts) else None,
        each("top_p", real) if any(part.top_p < 1 for part in parts) else None,
        each("min_p", real) if any(part.min_p > 0 for part in parts) else None,
    )


def join_structured(alike: Alike, parts: Items[StructuredPart], device: torch.device) -> Structured:
    """Return the rows of several sequences that are chosen in one call."""
    _, end, _ = alike
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
        end,
        send(following.repeat_interleave(counts), device),
    )


def values_of(slots: Items[StructuredPart], device: torch.device) -> Values:
    """Return the rows of slots whose values are judged as a whole."""
    width = max(len(slot.cells_L) for slot in slots)
    numbers = [
        (slot.end.end_id if slot.end is not None and slot.end.allowed else -1, slot.following)
        for slot in slots
    ]
    counts = torch.tensor([len(slot.rows_N) for slot in slots])
    end_E, following_E = torch.tensor(numbers).repeat_interleave(counts, dim=0).T.contiguous()
    return Values(
        joined([slot.rows_N for slot in slots], device),
        joined([number * width + slot.places_N for number, slot in enumerate(slots)], device),
        (len(slots), width),
        send(end_E, device),
        send(following_E, device),
    )


def joined(parts: Iterable[Tensor], device: torch.device) -> Tensor:
    return send(torch.cat(list(parts)), device)


def repeated(
    parts: Iterable[tuple[Tensor, float]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return each part's value once for each of its rows."""
    return joined([torch.full((len(rows),), value, dtype=dtype) for rows, value in parts], device)
