"""Slots of pinned canvases: values, probabilities of choices, and of whole values.

Letters: B sequences, E rows of slots, K options, L positions of a slot, N rows of a choice.
"""

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.components.backend import send
from diffray.components.block import Proposal
from diffray.components.grammar.choose import choose_together
from diffray.components.pinned_canvas import PinnedCanvas, Stretch
from diffray.components.propose import Chosen, spread
from diffray.components.sequence import Sequence
from diffray.components.slot_values import Values
from diffray.workers.draws import joined
from diffray.workers.features.feature import Feature
from diffray.workers.features.structured import StructuredPart, joined_by_kind
from diffray.workers.outcome import Outcome

if TYPE_CHECKING:
    from diffray.workers.head_plan import HeadPlan


class Choice(NamedTuple):
    """A slot whose options' probabilities are reported, and its rows."""

    canvas: PinnedCanvas
    stretch: Stretch
    rows_N: Tensor


class PinnedSlots(Feature):
    """The slots in the blocks of pinned canvases."""

    fused = True

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return isinstance(sequence.canvas, PinnedCanvas)

    @staticmethod
    def waits(sequence: Sequence) -> bool:
        """The options of choices are weighed after every step."""
        return isinstance(sequence.canvas, PinnedCanvas) and sequence.params.logprobs

    def plan_head(self, head: "HeadPlan") -> None:
        parts, whole = [], []
        self.choices: list[Choice] = []
        for block in head.blocks:
            sequence, canvas = block.sequence, block.sequence.canvas
            if not isinstance(canvas, PinnedCanvas) or sequence.automaton is not None:
                continue
            head.claim(block)
            for stretch in canvas.stretches(sequence.block):
                part = StructuredPart.of_slot(block, head.length, canvas, stretch)
                complete = stretch.whole and len(part.rows_N) == len(part.cells_L)
                if sequence.params.logprobs and complete:
                    self.choices.append(Choice(canvas, stretch, part.rows_N))
                if len(part.rows_N):
                    parts.append(part)
                    if sequence.policy.decoder.whole_slots:
                        whole.append(part)
        self.groups = joined_by_kind(parts, head.device)
        self.values = values_of(whole, head.device) if whole else None
        self.options_EK: Tensor | None = None
        if self.choices:
            ids = [torch.tensor(row) for each in self.choices for row in each.stretch.asked]
            self.ids_EK = send(pad_sequence(ids, batch_first=True), head.device)
            self.rows_E = joined([each.rows_N for each in self.choices], head.device)

    def needs_logits(self, head: "HeadPlan") -> bool:
        return bool(self.groups)

    def choose(self, chosen: Chosen) -> None:
        if self.choices:
            options_EK = chosen.logits.some(self.rows_E).gather(self.ids_EK)
            self.options_EK = options_EK - chosen.logsumexp_R[self.rows_E].unsqueeze(1)
        for group in self.groups:
            choose_together(chosen, group)

    def inspect(self, chosen: Chosen, proposal: Proposal) -> Proposal:
        if self.values is None:
            return proposal
        value_E = self.values.probability(chosen.logits, chosen.logsumexp_R, chosen.ids_R)
        nowhere_BL = value_E.new_full(chosen.block.ids_BL.shape, -torch.inf)
        cells_E = chosen.rows.cells_R[self.values.rows_E]
        return replace(proposal, value_BL=spread(value_E, cells_E, nowhere_BL))

    def report(self, outcomes: list[Outcome]) -> None:
        """Give canvases the probabilities of their choices' options."""
        if self.options_EK is None:
            return
        found, at = self.options_EK.tolist(), 0
        for choice in self.choices:
            size = choice.stretch.stop - choice.stretch.start
            choice.canvas.weigh(choice.stretch, found[at : at + size])
            at += size


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
