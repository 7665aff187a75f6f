"""What the requests ask of the head: which rows, how to choose, what to forbid.

Letters: B sequences, L positions of the longest block, R rows of the head, Q rows that draw, U rows
of guided sequences, E single entries, I of them in blocks, O outside.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.components.backend import send
from diffray.components.propose import Draws, LogitBias, Rows
from diffray.components.sequence import Sequence
from diffray.workers.layout import Layout


class Guided(NamedTuple):
    """Rows whose logits are led away from what their twins find."""

    rows_U: Tensor
    twins_U: Tensor  # index into the packed hidden states
    scale_U: Tensor


class Softened(NamedTuple):
    """What soft diffusion stores expectations of: masks in the blocks, and those after them."""

    rows_I: Tensor  # in the blocks: rows of the head, which has them anyway
    tokens_O: Tensor  # outside: index into the packed hidden states
    cells_E: Tensor  # of both: flat index into the slots
    sequences_E: Tensor


@dataclass(frozen=True, slots=True)
class Asked:
    """The head's rows: first those of the blocks, then those that only soft diffusion reads."""

    tokens_R: Tensor  # index into the packed hidden states
    rows: Rows
    guided: Guided | None
    soft: Softened | None

    @property
    def plain(self) -> bool:
        """Whether the head need not write its logits: one token a row is all that is asked for."""
        return self.rows.plain and self.guided is None and self.soft is None

    def read(self) -> Tensor:
        """Return the tokens whose hidden states are used."""
        if self.guided is None:
            return self.tokens_R
        return torch.cat([self.tokens_R, self.guided.twins_U])


def ask(
    sequences: Items[Sequence],
    first_only: Items[bool],
    layout: Layout,
    length: int,
    device: torch.device,
) -> Asked:
    """Collect the masked (or editable) positions of all blocks, and their requests' wishes.

    Sequences that are `first_only` ask for the first position of their block only.
    """
    wanted = [_wanted(s, only_first=only) for s, only in zip(sequences, first_only, strict=True)]
    wanted_BL = pad_sequence(wanted, batch_first=True)
    row_R, offset_R = wanted_BL.nonzero().unbind(1)
    tokens_R = _tokens(sequences, layout, row_R, offset_R)
    asked = _Collector(tokens_R, row_R * length + offset_R)
    ends = accumulate(wanted_BL.sum(1).tolist(), initial=0)
    for number, (sequence, span) in enumerate(zip(sequences, pairwise(ends), strict=True)):
        asked.block(number, sequence, slice(*span), offset_R, layout)
    for number, sequence in enumerate(sequences):
        if sequence.policy.iteration.soft:
            asked.beyond(number, sequence, layout)
    return asked.result(layout, device)


def _tokens(sequences: Items[Sequence], layout: Layout, row_R: Tensor, offset_R: Tensor) -> Tensor:
    """Return the packed tokens whose logits are about these positions of blocks."""
    # Position 0 has nobody before it: even where logits are shifted it reads its own.
    before_B = [
        offset - window_start
        for offset, (_, window_start, _, _) in zip(layout.offsets, layout.windows, strict=False)
    ]
    first_B = torch.tensor([s.start - s.logit_shift for s in sequences])
    return torch.tensor(before_B)[row_R] + (first_B[row_R] + offset_R).clamp(min=0)


def _wanted(sequence: Sequence, *, only_first: bool) -> Tensor:
    """Return at which positions of its block the sequence asks for a token."""
    if only_first:
        return torch.arange(sequence.start, sequence.stop) == sequence.start
    if sequence.policy.decoder.edits:
        return torch.arange(sequence.start, sequence.stop) >= sequence.prompt_len
    return sequence.masked


class _Collector:
    """Index tensors under construction, on the host; only wishes cost something per sequence."""

    def __init__(self, tokens_R: Tensor, cells_R: Tensor) -> None:
        self.count = len(tokens_R)
        self.tokens = [tokens_R]
        self.cells_R = cells_R
        self.draws: list[tuple[Tensor, float, int, float]] = []
        self.measured: list[tuple[Tensor, float, int, float]] = []
        self.edits: list[tuple[Tensor, Tensor, Tensor]] = []
        self.guided: list[tuple[Tensor, Tensor, float]] = []
        self.only: list[tuple[slice, Tensor]] = []
        self.doubted: list[tuple[Tensor, Tensor, Tensor]] = []
        self.ranked: list[slice] = []
        self.num_ranked = 0
        self.soft: list[tuple[Tensor, int]] = []

    def block(
        self, number: int, sequence: Sequence, span: slice, offset_R: Tensor, layout: Layout
    ) -> None:
        """Add what a sequence wishes for the rows of its block."""
        params, policy = sequence.params, sequence.policy
        rows = torch.arange(span.start, span.stop)
        filters = max(params.top_k, 0), params.top_p
        if params.draws:
            self.draws.append((rows, params.temperature, *filters))
        if policy.decoder.measures:
            temperature = params.temperature if params.draws else 1.0
            self.measured.append((rows, temperature, *filters))
        if params.top_logprobs:
            self.ranked.append(span)
            self.num_ranked = max(self.num_ranked, params.top_logprobs)
        if params.allowed_token_ids:
            allowed = torch.tensor(sorted({*params.allowed_token_ids, *sequence.end_ids}))
            self.only.append((span, allowed))
        if params.logit_bias or params.bad_token_ids or params.min_tokens:
            self._edit(sequence, span, sequence.start + offset_R[span])
        if ids := params.diffusion.zero_confidence_token_ids:
            rows = torch.arange(span.start, span.stop)
            self.doubted.append(_each(rows, list(ids), [-torch.inf] * len(ids)))
        if sequence.guided:
            shift = layout.uncond_offsets[number] - layout.offsets[number]
            rows = torch.arange(span.start, span.stop)
            self.guided.append((rows, self.tokens[0][span] + shift, policy.cfg_scale))
        if policy.iteration.soft:
            rows = torch.arange(span.start, span.stop)
            self.soft.append((rows[sequence.masked[offset_R[span]]], number))

    def beyond(self, number: int, sequence: Sequence, layout: Layout) -> None:
        """Add the masked positions of the window that stand after the block."""
        _, start, stop, _ = layout.windows[number]
        stop = min(stop, sequence.blocks_stop)
        positions = torch.arange(sequence.stop, max(stop, sequence.stop))
        rows = torch.arange(self.count, self.count + len(positions))
        self.count += len(positions)
        self.tokens.append(layout.offsets[number] + positions - start)
        self.soft.append((rows, number))

    def _edit(self, sequence: Sequence, span: slice, positions: Tensor) -> None:
        params, rows = sequence.params, torch.arange(span.start, span.stop)
        if params.logit_bias:
            biases = list(params.logit_bias), list(params.logit_bias.values())
            self.edits.append(_each(rows, *biases))
        if ids := params.bad_token_ids:
            self.edits.append(_each(rows, list(ids), [-torch.inf] * len(ids)))
        early = rows[positions < sequence.prompt_len + params.min_tokens]
        if len(early) and sequence.end_ids:
            ends = sorted(sequence.end_ids)
            self.edits.append(_each(early, ends, [-torch.inf] * len(ends)))

    def result(self, layout: Layout, device: torch.device) -> Asked:
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

        guided = soft = None
        real = torch.float64
        if self.guided:
            guided = Guided(
                joined([rows for rows, _, _ in self.guided]),
                joined([twins for _, twins, _ in self.guided]),
                repeated([(rows, scale) for rows, _, scale in self.guided], real),
            )
        tokens_R = joined(self.tokens)
        if self.soft:
            rows_E = torch.cat([rows for rows, _ in self.soft])  # those in blocks come first
            inside = int((rows_E < len(self.cells_R)).sum())
            rows_E = send(rows_E, device)
            tokens_E = tokens_R[rows_E]
            soft = Softened(
                rows_E[:inside],
                tokens_E[inside:],
                layout.batch.cells_T[tokens_E],
                repeated(self.soft, torch.long),
            )
        rows = Rows(
            cells_R=send(self.cells_R, device),
            draws=drawing(self.draws),
            measured=drawing(self.measured),
            edits=LogitBias(*map(joined, zip(*self.edits, strict=True))) if self.edits else None,
            only=tuple((span, send(ids, device)) for span, ids in self.only),
            doubted=LogitBias(*map(joined, zip(*self.doubted, strict=True)))
            if self.doubted
            else None,
            ranked=tuple(self.ranked),
            num_ranked=self.num_ranked,
        )
        return Asked(tokens_R, rows, guided, soft)


def _each(rows: Tensor, ids: list[int], values: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a value for each of these tokens in each row: row, id and value of every pair."""
    return (
        rows.repeat_interleave(len(ids)),
        torch.tensor(ids).repeat(len(rows)),
        torch.tensor(values, dtype=torch.float64).repeat(len(rows)),
    )
