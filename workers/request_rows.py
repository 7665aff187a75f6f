"""What the requests ask of the head: which rows, how to choose, what to forbid.

Letters: R rows of the head, U rows of guided sequences, E single entries.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from diffray.components.propose import Rows
from diffray.components.sequence import Sequence
from diffray.workers.layout import Layout


@dataclass(frozen=True, slots=True)
class Asked:
    """The head's rows: first those of the blocks, then those that only soft diffusion reads."""

    tokens_R: Tensor  # index into the packed hidden states
    rows: Rows
    guided_U: Tensor | None
    twins_U: Tensor
    scale_U: Tensor
    soft_rows_E: Tensor
    soft_cells_E: Tensor  # flat index into the slots
    soft_sequences_E: Tensor


def ask(sequences: Items[Sequence], layout: Layout, length: int, device: torch.device) -> Asked:
    """Collect the masked (or editable) positions of all blocks, and their requests' wishes."""
    asked = _Collector(length)
    for number, sequence in enumerate(sequences):
        asked.block(number, sequence, layout)
    for number, sequence in enumerate(sequences):
        if sequence.policy.iteration.soft:
            asked.beyond(number, sequence, layout)
    return asked.result(layout, device)


class _Collector:
    """Index tensors under construction, on the host; a few per sequence, none per token."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.count = 0
        self.tokens: list[Tensor] = []
        self.cells: list[Tensor] = []
        self.draws: list[tuple[Tensor, float, int, float]] = []
        self.edits: list[tuple[Tensor, Tensor, Tensor]] = []
        self.guided: list[tuple[Tensor, Tensor, float]] = []
        self.only: list[tuple[slice, Tensor]] = []
        self.ranked: list[slice] = []
        self.num_ranked = 0
        self.soft: list[tuple[Tensor, int]] = []

    def block(self, number: int, sequence: Sequence, layout: Layout) -> None:
        wanted_L = sequence.masked
        if sequence.policy.decoder.edits:
            wanted_L = torch.arange(sequence.start, sequence.stop) >= sequence.prompt_len
        offsets = wanted_L.nonzero().squeeze(1)
        span = slice(self.count, self.count + len(offsets))
        rows = torch.arange(span.start, span.stop)
        self.count = span.stop
        inside = sequence.start - layout.starts[number] + offsets
        self.tokens.append(layout.offsets[number] + inside)
        self.cells.append(number * self.length + offsets)
        params = sequence.params
        if params.temperature > 0:
            self.draws.append((rows, params.temperature, max(params.top_k, 0), params.top_p))
        if params.top_logprobs:
            self.ranked.append(span)
            self.num_ranked = max(self.num_ranked, params.top_logprobs)
        if params.allowed_token_ids:
            allowed = torch.tensor(sorted({*params.allowed_token_ids, *sequence.end_ids}))
            self.only.append((span, allowed))
        self._edit(sequence, rows, sequence.start + offsets)
        if sequence.guided:
            twins = layout.twin_offsets[number] + inside
            self.guided.append((rows, twins, sequence.policy.cfg_scale))
        if sequence.policy.iteration.soft:
            self.soft.append((rows[sequence.masked[offsets]], number))

    def beyond(self, number: int, sequence: Sequence, layout: Layout) -> None:
        """Add the masked positions of the window that stand after the block."""
        start, stop = layout.starts[number], min(layout.stops[number], sequence.blocks_stop)
        positions = torch.arange(sequence.stop, max(stop, sequence.stop))
        rows = torch.arange(self.count, self.count + len(positions))
        self.count += len(positions)
        self.tokens.append(layout.offsets[number] + positions - start)
        self.soft.append((rows, number))

    def _edit(self, sequence: Sequence, rows: Tensor, positions: Tensor) -> None:
        params = sequence.params
        if params.logit_bias:
            self._each(rows, list(params.logit_bias), list(params.logit_bias.values()))
        if params.bad_token_ids:
            self._each(rows, list(params.bad_token_ids), [-torch.inf] * len(params.bad_token_ids))
        early = rows[positions < sequence.prompt_len + params.min_tokens]
        if len(early) and sequence.end_ids:
            self._each(early, sorted(sequence.end_ids), [-torch.inf] * len(sequence.end_ids))

    def _each(self, rows: Tensor, ids: list[int], values: list[float]) -> None:
        self.edits.append(
            (
                rows.repeat_interleave(len(ids)),
                torch.tensor(ids).repeat(len(rows)),
                torch.tensor(values, dtype=torch.float64).repeat(len(rows)),
            )
        )

    def result(self, layout: Layout, device: torch.device) -> Asked:
        def ints(parts: list[Tensor]) -> Tensor:
            return torch.cat([torch.zeros(0, dtype=torch.long), *parts]).to(device)

        def repeated(parts: list[tuple[Tensor, float]], dtype: torch.dtype) -> Tensor:
            values = [torch.full((len(rows),), value, dtype=dtype) for rows, value in parts]
            return torch.cat([torch.zeros(0, dtype=dtype), *values]).to(device)

        real = torch.float64
        edits = [values for _, _, values in self.edits]
        rows = Rows(
            cells_R=ints(self.cells),
            draw_Q=ints([rows for rows, *_ in self.draws]),
            temperature_Q=repeated([(r, t) for r, t, _, _ in self.draws], real),
            top_k_Q=repeated([(r, k) for r, _, k, _ in self.draws], torch.long)
            if any(k > 0 for _, _, k, _ in self.draws)
            else None,
            top_p_Q=repeated([(r, p) for r, _, _, p in self.draws], real)
            if any(p < 1 for _, _, _, p in self.draws)
            else None,
            edit_rows_E=ints([rows for rows, _, _ in self.edits]),
            edit_ids_E=ints([ids for _, ids, _ in self.edits]),
            edit_values_E=torch.cat([torch.zeros(0, dtype=real), *edits]).to(device),
            only=tuple((span, ids.to(device)) for span, ids in self.only),
            ranked=tuple(self.ranked),
            num_ranked=self.num_ranked,
        )
        tokens_R = ints(self.tokens)
        soft_rows_E = ints([rows for rows, _ in self.soft])
        return Asked(
            tokens_R=tokens_R,
            rows=rows,
            guided_U=ints([rows for rows, _, _ in self.guided]) if self.guided else None,
            twins_U=ints([twins for _, twins, _ in self.guided]),
            scale_U=repeated([(r, scale) for r, _, scale in self.guided], real),
            soft_rows_E=soft_rows_E,
            soft_cells_E=layout.cells_T[tokens_R[soft_rows_E]],
            soft_sequences_E=repeated([(r, n) for r, n in self.soft], torch.long),
        )
