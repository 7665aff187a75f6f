"""What the head computes for a step: which rows, how to choose tokens, what to forbid.

Letters: B sequences, L positions of the longest block, R rows of the head, Q rows that draw, U rows
of guided sequences, E single entries, I of them in blocks, O outside.
"""

from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.components.backend import send
from diffray.components.grammar.automaton import Automaton
from diffray.components.grammar.paths import Entry
from diffray.components.propose import Draws, Rows, Structured
from diffray.components.sequence import Sequence
from diffray.components.transforms import KINDS, Bias, LogitBias, Planned, Where
from diffray.workers.layout import Layout


class Softened(NamedTuple):
    """What soft diffusion stores expectations of: masks in the blocks, and those after them."""

    rows_I: Tensor  # in the blocks: rows of the head, which has them anyway
    tokens_O: Tensor  # outside: index into the packed hidden states
    cells_E: Tensor  # of both: flat index into the slots
    sequences_E: Tensor


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The head's rows: first those of the blocks, then those that only soft diffusion reads."""

    tokens_R: Tensor  # index into the packed hidden states
    read_T: Tensor  # all tokens whose hidden states are used: those, and the twins of guided rows
    rows: Rows
    soft: Softened | None

    @property
    def plain(self) -> bool:
        """Whether the head need not write its logits: each row needs one token and no more."""
        return self.rows.plain and self.soft is None


def plan_head(
    sequences: Items[Sequence],
    first_only: Items[bool],
    layout: Layout,
    length: int,
    device: torch.device,
) -> HeadPlan:
    """Collect the masked (or editable) positions of all blocks, with the options of their requests.

    Of sequences that are `first_only`, only the first position of their block.
    """
    wanted = [_wanted(s, only_first=only) for s, only in zip(sequences, first_only, strict=True)]
    wanted_BL = pad_sequence(wanted, batch_first=True)
    row_R, offset_R = wanted_BL.nonzero().unbind(1)
    tokens_R = _tokens(sequences, layout, row_R, offset_R)
    plan = _Collector(tokens_R, row_R * length + offset_R, length)
    ends = accumulate(wanted_BL.sum(1).tolist(), initial=0)
    for number, (sequence, span) in enumerate(zip(sequences, pairwise(ends), strict=True)):
        plan.block(number, sequence, slice(*span), offset_R, layout)
    for number, sequence in enumerate(sequences):
        if sequence.policy.iteration.soft:
            plan.beyond(number, sequence, layout)
    return plan.result(layout, device)


def _tokens(sequences: Items[Sequence], layout: Layout, row_R: Tensor, offset_R: Tensor) -> Tensor:
    """Return the packed tokens whose logits are about these positions of blocks."""
    # Position 0 has none before it: even where logits are shifted it reads its own.
    before_B = [
        offset - window_start
        for offset, (_, window_start, _, _) in zip(layout.offsets, layout.windows, strict=False)
    ]
    first_B = torch.tensor([s.start - s.logit_shift for s in sequences])
    return torch.tensor(before_B)[row_R] + (first_B[row_R] + offset_R).clamp(min=0)


def _wanted(sequence: Sequence, *, only_first: bool) -> Tensor:
    """Return at which positions of its block the sequence needs a token."""
    if only_first:
        return torch.arange(sequence.start, sequence.stop) == sequence.start
    if sequence.policy.decoder.edits:
        return torch.arange(sequence.start, sequence.stop) >= sequence.prompt_len
    return sequence.masked


class _StructuredPart(NamedTuple):
    """A sequence's rows that are chosen together, on the host."""

    number: int
    sequence: Sequence
    rows: Tensor
    offsets: Tensor  # in the block
    draw: tuple[Tensor, float, int, float] | None

    @property
    def room(self) -> int:
        """How many positions of the answer follow the block."""
        return max(self.sequence.limit - self.sequence.stop, 0)

    def valid(self, length: int) -> Tensor:
        """Return which positions of the block belong to the answer."""
        at = self.sequence.start + torch.arange(length)
        stop = min(self.sequence.stop, self.sequence.limit)
        return (at >= self.sequence.prompt_len) & (at < stop)


@lru_cache(64)
def _on_device(automaton: Automaton, device: torch.device) -> Automaton:
    return automaton.on(device)


class _Collector:
    """Index tensors under construction, on the host; plain requests add almost nothing."""

    def __init__(self, tokens_R: Tensor, cells_R: Tensor, length: int) -> None:
        self.count = len(tokens_R)
        self.length = length  # of the longest block
        self.tokens = [tokens_R]
        self.cells_R = cells_R
        self.draws: list[tuple[Tensor, float, int, float]] = []
        self.measured: list[tuple[Tensor, float, int, float]] = []
        self.transforms: dict[type[Planned], list[Planned]] = defaultdict(list)
        self.doubted: list[LogitBias] = []
        self.structured: dict[tuple[Automaton, bool], list[_StructuredPart]] = defaultdict(list)
        self.twins: list[Tensor] = []
        self.ranked: list[slice] = []
        self.num_ranked = 0
        self.soft: list[tuple[Tensor, int]] = []  # rows, and the number of their sequence
        self.soft_tokens: list[Tensor] = []  # that stand at the positions that the rows are about

    def block(
        self, number: int, sequence: Sequence, span: slice, offset_R: Tensor, layout: Layout
    ) -> None:
        """Add the rows of a sequence's block, with its options."""
        params, policy = sequence.params, sequence.policy
        filters = max(params.top_k, 0), params.top_p
        draw = (_rows(span), params.temperature, *filters) if params.draws else None
        if sequence.automaton is not None:
            part = _StructuredPart(number, sequence, _rows(span), offset_R[span], draw)
            self.structured[sequence.automaton, params.draws].append(part)
        elif draw is not None:
            self.draws.append(draw)
        if policy.decoder.measures:
            temperature = params.temperature if params.draws else 1.0
            self.measured.append((_rows(span), temperature, *filters))
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
            masked = sequence.masked[offset_R[span]]
            positions = sequence.start + offset_R[span][masked]
            self._soften(number, _rows(span)[masked], positions, layout)

    def beyond(self, number: int, sequence: Sequence, layout: Layout) -> None:
        """Add the masked positions of the window that stand after the block."""
        _, start, stop, _ = layout.windows[number]
        stop = min(stop, sequence.blocks_stop)
        positions = torch.arange(sequence.stop, max(stop, sequence.stop))
        rows = torch.arange(self.count, self.count + len(positions))
        self.count += len(positions)
        self.tokens.append(layout.offsets[number] + positions - sequence.logit_shift - start)
        self._soften(number, rows, positions, layout)

    def _where(
        self, number: int, sequence: Sequence, span: slice, offset_R: Tensor, layout: Layout
    ) -> Where:
        twins = None
        if sequence.guided:
            twins = self.tokens[0][span] + layout.uncond_offsets[number] - layout.offsets[number]
            self.twins.append(twins)
        return Where(span, sequence.start + offset_R[span], twins)

    def _soften(self, number: int, rows: Tensor, positions: Tensor, layout: Layout) -> None:
        self.soft.append((rows, number))
        self.soft_tokens.append(layout.offsets[number] + positions - layout.windows[number][1])

    def result(self, layout: Layout, device: torch.device) -> HeadPlan:
        def joined(parts: Items[Tensor]) -> Tensor:
            return send(torch.cat(list(parts)), device)

        def repeated(parts: Items[tuple[Tensor, float]], dtype: torch.dtype) -> Tensor:
            return joined([torch.full((len(rows),), value, dtype=dtype) for rows, value in parts])

        def drawing(parts: Items[tuple[Tensor, float, int, float]]) -> Draws | None:
            if not parts:
                return None
            return Draws(
                joined([rows for rows, *_ in parts]),
                repeated([(rows, t) for rows, t, _, _ in parts], real),
                repeated([(rows, k) for rows, _, k, _ in parts], torch.long)
                if any(k > 0 for _, _, k, _ in parts)
                else None,
                repeated([(rows, p) for rows, _, _, p in parts], real)
                if any(p < 1 for _, _, _, p in parts)
                else None,
            )

        def structured(parts: list[_StructuredPart]) -> Structured:
            automaton = parts[0].sequence.automaton
            assert automaton is not None
            entry = Entry(
                send(torch.tensor([part.sequence.state for part in parts]), device),
                send(torch.stack([part.valid(self.length) for part in parts]), device),
                send(torch.tensor([part.room for part in parts]), device),
            )
            return Structured(
                _on_device(automaton, device),
                send(torch.tensor([part.number for part in parts]), device),
                entry,
                joined([part.rows for part in parts]),
                joined([g * self.length + part.offsets for g, part in enumerate(parts)]),
                drawing([part.draw for part in parts if part.draw is not None]),
            )

        real = torch.float64
        soft = None
        tokens_R = joined(self.tokens)
        if self.soft:
            rows_E = torch.cat([rows for rows, _ in self.soft])  # those in blocks come first
            inside = int((rows_E < len(self.cells_R)).sum())
            rows_E = send(rows_E, device)
            soft = Softened(
                rows_E[:inside],
                tokens_R[rows_E[inside:]],
                layout.batch.cells_T[joined(self.soft_tokens)],
                repeated(self.soft, torch.long),
            )
        rows = Rows(
            cells_R=send(self.cells_R, device),
            draws=drawing(self.draws),
            structured=tuple(structured(parts) for parts in self.structured.values()),
            measured=drawing(self.measured),
            transforms=tuple(
                kind.join(self.transforms[kind], device)
                for kind in KINDS
                if kind in self.transforms
            ),
            doubted=LogitBias.join(self.doubted, device) if self.doubted else None,
            ranked=tuple(self.ranked),
            num_ranked=self.num_ranked,
        )
        read_T = torch.cat([tokens_R, joined(self.twins)]) if self.twins else tokens_R
        return HeadPlan(tokens_R, read_T, rows, soft)


def _rows(span: slice) -> Tensor:
    return torch.arange(span.start, span.stop)
