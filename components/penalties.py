"""Presence, frequency and repetition penalties, as vLLM defines them, on a canvas.

They count the tokens on the canvas before each step, so there is no state: a preempted request
finds the same counts on resume. Generated tokens are the final tokens of the answer, before and
after the position in question, up to its first end token; tokens that become final in the same
step do not see each other. The literals of a pinned canvas are given, like a prompt.
Letters: G requests, N positions of their longest canvas, E end tokens, Q rows, V this rank's
vocabulary.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.components.backend import send
from diffray.components.logits import Logits
from diffray.components.pinned_canvas import PinnedCanvas
from diffray.components.row_transform import Planned, Step, Where

_ROWS = 256  # changed at a time: each needs several copies of its canvas


class _Text(NamedTuple):
    """What the canvases of some requests hold."""

    ids_GN: Tensor
    given_GN: Tensor  # prompts, suffixes and literals
    written_GN: Tensor  # final tokens of the answers


@dataclass(frozen=True, slots=True)
class Penalized(Planned):
    """Rows whose logits depend on what their canvas holds."""

    facts_G5: Tensor  # slot; ends of the prompt, the answer, the blocks and the canvas
    strength_G3: Tensor  # presence, frequency, repetition
    ends_GE: Tensor  # padded with -1
    literal_GN: Tensor  # of pinned canvases
    member_Q: Tensor
    rows_Q: Tensor
    positions_Q: Tensor
    longest: int

    @classmethod
    def join(cls, parts: Items[Self], device: torch.device) -> Self:
        def joined(tensors: Iterable[Tensor]) -> Tensor:
            return send(torch.cat(list(tensors)), device)

        counts = torch.tensor([len(part.rows_Q) for part in parts])
        ends = [part.ends_GE.squeeze(0) for part in parts]
        return cls(
            joined(part.facts_G5 for part in parts),
            joined(part.strength_G3 for part in parts),
            send(pad_sequence(ends, batch_first=True, padding_value=-1), device),
            send(pad_sequence([p.literal_GN.squeeze(0) for p in parts], batch_first=True), device),
            send(torch.arange(len(parts)).repeat_interleave(counts), device),
            joined(part.rows_Q for part in parts),
            joined(part.positions_Q for part in parts),
            max(part.longest for part in parts),
        )

    def apply(self, logits: Logits, step: Step) -> None:
        ids_GN, given_GN, written_GN = self._text(step)
        given_GV = logits.counts(ids_GN, given_GN) > 0
        written_GV = logits.counts(ids_GN, written_GN)
        # Only columns of ids on the canvas change. Ids of other ranks are clamped, and ids repeat,
        # but every write to a column has the same value, so their order does not matter.
        column_GN, here_GN = logits.local(ids_GN)
        for begin in range(0, len(self.rows_Q), _ROWS):
            part = slice(begin, begin + _ROWS)
            member_Q, rows_Q1 = self.member_Q[part], self.rows_Q[part].unsqueeze(1)
            column_QN, member_Q1 = column_GN[member_Q], member_Q.unsqueeze(1)
            # A token that an editing decoder may replace does not count against itself.
            own_Q1 = self.positions_Q[part].unsqueeze(1)
            counted_Q1 = (written_GN & here_GN)[member_Q].gather(1, own_Q1)
            own_QN = (column_QN == column_QN.gather(1, own_Q1)) & counted_Q1
            count_QN = written_GV[member_Q1, column_QN] - own_QN.to(written_GV)
            logits.values_RV[rows_Q1, column_QN] = _penalized(
                logits.values_RV[rows_Q1, column_QN],
                count_QN,
                given_GV[member_Q1, column_QN],
                self.strength_G3[member_Q],
            )

    def _text(self, step: Step) -> _Text:
        slot_G, *ends = self.facts_G5.unbind(1)
        prompt_G1, limit_G1, blocks_G1, length_G1 = (end_G.unsqueeze(1) for end_G in ends)
        ids_GN = step.ids_SN[:, : self.longest][slot_G]
        masked_GN = step.masked_SN[:, : self.longest][slot_G]
        at_N = torch.arange(self.longest, device=ids_GN.device)
        given_GN = (at_N < prompt_G1) | ((at_N >= blocks_G1) & (at_N < length_G1)) | self.literal_GN
        answer_GN = (at_N >= prompt_G1) & (at_N < limit_G1) & ~masked_GN & ~self.literal_GN
        is_end_GN = (ids_GN.unsqueeze(-1) == self.ends_GE.unsqueeze(1)).any(-1) & answer_GN
        return _Text(ids_GN, given_GN, answer_GN & (is_end_GN.cumsum(1) == 0))


def _penalized(
    values_QN: Tensor, count_QN: Tensor, given_QN: Tensor, strength_Q3: Tensor
) -> Tensor:
    presence_Q1, frequency_Q1, repetition_Q1 = strength_Q3.to(values_QN).split(1, dim=1)
    written_QN = count_QN > 0
    repeated_QN = torch.where(values_QN > 0, values_QN / repetition_Q1, values_QN * repetition_Q1)
    values_QN = torch.where(written_QN | given_QN, repeated_QN, values_QN)
    found_QN: Tensor = values_QN - frequency_Q1 * count_QN - presence_Q1 * written_QN
    return found_QN


@dataclass(frozen=True, slots=True)
class Penalties:
    """Make tokens that the text already has less probable, or more."""

    presence: float  # subtracted from a logit if the answer has its token ...
    frequency: float  # ... and for each time that the answer has it
    repetition: float  # positive logits are divided by it if the prompt or the answer has the token

    def plan(self, where: Where) -> Penalized:
        sequence, canvas = where.sequence, where.sequence.canvas
        strength = [self.presence, self.frequency, self.repetition]
        # Literals of a pinned canvas may follow its blocks, and a growing one the limit.
        limit = canvas.blocks_stop
        if not sequence.policy.canvas_length:
            limit = min(canvas.limit, limit)
        literal_N = torch.zeros(canvas.length, dtype=torch.bool)
        if isinstance(canvas, PinnedCanvas):
            cells_N = torch.tensor(canvas.cells[: limit - canvas.prompt_len])
            literal_N[canvas.prompt_len : limit] = cells_N >= 0
        places = [sequence.slot, canvas.prompt_len, limit, canvas.blocks_stop, canvas.length]
        return Penalized(
            torch.tensor([places]),
            torch.tensor([strength], dtype=torch.float64),
            torch.tensor([sorted(sequence.end_ids)], dtype=torch.long),
            literal_N.unsqueeze(0),
            torch.zeros(len(where.positions_R), dtype=torch.long),
            where.rows_R,
            where.positions_R,
            canvas.length,
        )
