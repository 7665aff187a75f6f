"""What the head computes for a step: which rows, how to choose tokens, what to forbid.

Letters: B sequences, L positions of the longest block, R rows of the head, Q rows that draw, U rows
of guided sequences, E soft positions, I of them in blocks, O outside.
"""

from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.components.backend import send
from diffray.components.pinned_canvas import PinnedCanvas, Stretch
from diffray.components.propose import Options, Rows, SlotEnd
from diffray.components.row_transform import Planned, Where
from diffray.components.sequence import Sequence
from diffray.components.transforms import KINDS, Bias, LogitBias
from diffray.workers.layout import Layout, Span
from diffray.workers.structured_rows import (
    Alike,
    Draw,
    StructuredPart,
    join_draws,
    join_structured,
    joined,
    repeated,
    values_of,
)


class Softened(NamedTuple):
    """The masks whose expected embeddings soft diffusion stores, in the blocks and after them."""

    rows_I: Tensor  # in the blocks: rows of the head, which computes them anyway
    tokens_O: Tensor  # outside: index into the packed hidden states
    cells_E: Tensor  # both: flat index into the slots
    sequences_E: Tensor


class Choice(NamedTuple):
    """A slot whose options' probabilities are reported, and its rows."""

    canvas: PinnedCanvas
    stretch: Stretch
    rows_N: Tensor


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The head's rows: first those of the blocks, then those that only soft diffusion reads."""

    tokens_R: Tensor  # index into the packed hidden states
    read_T: Tensor  # all tokens whose hidden states are read: those, and guided rows' copies
    rows: Rows
    soft: Softened | None
    choices: tuple[Choice, ...] = ()  # in the order of their rows in `rows.options`

    def weigh(self, options_EK: Tensor) -> None:
        """Give pinned canvases the probabilities of their choices' options, on the host."""
        at = 0
        for choice in self.choices:
            size = choice.stretch.stop - choice.stretch.start
            choice.canvas.weigh(choice.stretch, options_EK[at : at + size].tolist())
            at += size

    @property
    def plain(self) -> bool:
        """Whether the head need not store its logits, as each row needs just one token."""
        return self.rows.plain and self.soft is None


def plan_head(
    sequences: Items[Sequence],
    numbers: Items[int],
    first_only: Items[bool],
    layout: Layout,
    length: int,
    device: torch.device,
) -> HeadPlan:
    """Collect the masked (or editable) positions of all blocks, with the options of their requests.

    Sequences that are `first_only` add only the first position of their block. A sequence occurs
    once for each of its canvases that are run; `numbers` are the canvases' rows in [B, L].
    """
    wanted = [
        _wanted(s, window, only_first=only)
        for s, window, only in zip(sequences, layout.windows, first_only, strict=False)
    ]
    wanted_BL = pad_sequence(wanted, batch_first=True)
    row_R, offset_R = wanted_BL.nonzero().unbind(1)
    tokens_R = _tokens(sequences, layout, row_R, offset_R)
    plan = _Collector(tokens_R, torch.tensor(numbers)[row_R] * length + offset_R, length)
    ends = accumulate(wanted_BL.sum(1).tolist(), initial=0)
    for number, (sequence, span) in enumerate(zip(sequences, pairwise(ends), strict=True)):
        plan.block(number, sequence, slice(*span), offset_R, layout)
    for number, sequence in enumerate(sequences):
        if sequence.policy.iteration.soft:
            plan.beyond(number, sequence, layout)
    return plan.result(layout, device)


def _tokens(sequences: Items[Sequence], layout: Layout, row_R: Tensor, offset_R: Tensor) -> Tensor:
    """Return the packed tokens whose logits predict these positions of blocks."""
    # Position 0 has no position before it, so it reads its own logits even if they are shifted.
    before_B = [
        offset - window.start
        for offset, window in zip(layout.offsets, layout.windows, strict=False)
    ]
    first_B = torch.tensor([s.block.start - s.spec.logit_shift for s in sequences])
    return torch.tensor(before_B)[row_R] + (first_B[row_R] + offset_R).clamp(min=0)


def _wanted(sequence: Sequence, window: Span, *, only_first: bool) -> Tensor:
    """Return the positions of its block at which the sequence needs a token, as a mask."""
    positions = torch.arange(sequence.block.start, sequence.block.stop)
    if only_first:
        return positions == sequence.block.start
    wanted = sequence.block.masked
    if sequence.policy.decoder.edits:
        wanted = positions >= sequence.canvas.prompt_len
    if sequence.policy.cache.follows_masks:
        first = window.start + sequence.spec.logit_shift
        wanted = wanted & (positions >= first) & (positions < window.stop)
    return wanted


class _Collector:
    """Index tensors under construction, on the host; plain requests add almost nothing."""

    def __init__(self, tokens_R: Tensor, cells_R: Tensor, length: int) -> None:
        self.count = len(tokens_R)
        self.length = length  # of the longest block
        self.tokens = [tokens_R]
        self.cells_R = cells_R
        self.draws: list[Draw] = []
        self.measured: list[Draw] = []
        self.transforms: dict[type[Planned], list[Planned]] = defaultdict(list)
        self.doubted: list[LogitBias] = []
        self.structured: dict[Alike, list[StructuredPart]] = defaultdict(list)
        self.choices: list[Choice] = []
        self.slots: list[StructuredPart] = []  # whose values are judged as a whole
        self.uncond_tokens: list[Tensor] = []
        self.ranked: list[slice] = []
        self.num_ranked = 0
        self.redraws = self.keeps_best = False
        self.soft: list[tuple[Tensor, int]] = []  # rows, and the number of their sequence
        self.soft_tokens: list[Tensor] = []  # the packed tokens at the positions of these rows

    def block(
        self, number: int, sequence: Sequence, span: slice, offset_R: Tensor, layout: Layout
    ) -> None:
        """Add the rows of a sequence's block, with its options."""
        params, policy = sequence.params, sequence.policy
        filters = max(params.top_k, 0), params.top_p, params.min_p
        temperature = sequence.temperature(sequence.block.step)
        draw = Draw(_rows(span), temperature, *filters) if params.draws else None
        own = _rows(span), offset_R[span], draw
        if sequence.automaton is not None:
            part = StructuredPart.of_answer(number, sequence, self.length, *own)
            self.structured[part.alike].append(part)
        elif isinstance(sequence.canvas, PinnedCanvas):
            self._slots(number, sequence, sequence.canvas, *own)
        elif draw is not None:
            self.draws.append(draw)
            self.redraws |= policy.speculation is not None and bool(sequence.copies)
        if policy.decoder.measures:
            self.measured.append(Draw(_rows(span), temperature, *filters))
        self.keeps_best |= policy.iteration.renoises
        if params.top_logprobs:
            self.ranked.append(span)
            self.num_ranked = max(self.num_ranked, params.top_logprobs)
        doubted = params.diffusion.zero_confidence_token_ids
        if sequence.transforms or doubted:
            where = self._where(number, sequence, span, offset_R, layout)
            for transform in sequence.transforms:
                if planned := transform.plan(where):
                    self.transforms[type(planned)].append(planned)
            if doubted and (bias := Bias.forbid(doubted).plan(where)):
                self.doubted.append(bias)
        if policy.iteration.soft:
            masked = sequence.block.masked[offset_R[span]]
            positions = sequence.block.start + offset_R[span][masked]
            self._soften(number, _rows(span)[masked], positions, layout)

    def _slots(
        self,
        number: int,
        sequence: Sequence,
        canvas: PinnedCanvas,
        rows_N: Tensor,
        offsets_N: Tensor,
        draw: Draw | None,
    ) -> None:
        """Add the slots of a pinned canvas; tokens of each are chosen separately."""
        params, end_id = sequence.params, canvas.template.end_id
        first = canvas.first_cell(sequence.block)
        for stretch in canvas.stretches(sequence.block):
            end = SlotEnd(end_id, stretch.roomy)
            part = StructuredPart.of_slot(stretch, first, end, rows_N, offsets_N, draw)
            part = part._replace(cells_L=part.cells_L + number * self.length)
            if params.logprobs and stretch.whole and len(part.rows_N) == len(part.cells_L):
                self.choices.append(Choice(canvas, stretch, part.rows_N))
            if len(part.rows_N):
                self.structured[part.alike].append(part)
                if sequence.policy.decoder.whole_slots:
                    self.slots.append(part)

    def beyond(self, number: int, sequence: Sequence, layout: Layout) -> None:
        """Add the masked positions of the window after the block."""
        window = layout.windows[number]
        stop = min(window.stop, sequence.canvas.blocks_stop)
        positions = torch.arange(sequence.block.stop, max(stop, sequence.block.stop))
        rows = torch.arange(self.count, self.count + len(positions))
        self.count += len(positions)
        before = sequence.spec.logit_shift + window.start
        self.tokens.append(layout.offsets[number] + positions - before)
        self._soften(number, rows, positions, layout)

    def _where(
        self, number: int, sequence: Sequence, span: slice, offset_R: Tensor, layout: Layout
    ) -> Where:
        uncond_R = None
        if sequence.uncond is not None:
            uncond = layout.offset_of(layout.windows[number]._replace(copy=sequence.uncond))
            uncond_R = self.tokens[0][span] + uncond - layout.offsets[number]
            self.uncond_tokens.append(uncond_R)
        return Where(span, sequence.block.start + offset_R[span], uncond_R, sequence)

    def _soften(self, number: int, rows: Tensor, positions: Tensor, layout: Layout) -> None:
        self.soft.append((rows, number))
        self.soft_tokens.append(layout.offsets[number] + positions - layout.windows[number].start)

    def result(self, layout: Layout, device: torch.device) -> HeadPlan:
        soft = None
        tokens_R = joined(self.tokens, device)
        if self.soft:
            rows_E = torch.cat([rows for rows, _ in self.soft])  # those in blocks come first
            inside = int((rows_E < len(self.cells_R)).sum())
            rows_E = send(rows_E, device)
            soft = Softened(
                rows_E[:inside],
                tokens_R[rows_E[inside:]],
                layout.batch.cells_T[joined(self.soft_tokens, device)],
                repeated(self.soft, torch.long, device),
            )
        rows = Rows(
            cells_R=send(self.cells_R, device),
            draws=join_draws(self.draws, device),
            structured=tuple(
                join_structured(alike, parts, device) for alike, parts in self.structured.items()
            ),
            measured=join_draws(self.measured, device),
            transforms=tuple(
                kind.join(self.transforms[kind], device)
                for kind in KINDS
                if kind in self.transforms
            ),
            doubted=LogitBias.join(self.doubted, device) if self.doubted else None,
            ranked=tuple(self.ranked),
            num_ranked=self.num_ranked,
            options=self._options(device) if self.choices else None,
            values=values_of(self.slots, device) if self.slots else None,
            redraws=self.redraws,
            keeps_best=self.keeps_best,
        )
        read_T = (
            torch.cat([tokens_R, joined(self.uncond_tokens, device)])
            if self.uncond_tokens
            else tokens_R
        )
        return HeadPlan(tokens_R, read_T, rows, soft, tuple(self.choices))

    def _options(self, device: torch.device) -> Options:
        ids = [row for choice in self.choices for row in choice.stretch.asked]
        return Options(
            send(torch.cat([choice.rows_N for choice in self.choices]), device),
            send(pad_sequence([torch.tensor(row) for row in ids], batch_first=True), device),
        )


def _rows(span: slice) -> Tensor:
    return torch.arange(span.start, span.stop)
