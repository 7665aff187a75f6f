"""The memory of rows whose decoders give credit, from one plan to the next.

Letters: B rows, L positions of the longest block, K positions of the longest block with credit.
"""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffray.components.backend import send
from diffray.kernels.credit import Credits, Gains, Memory
from diffray.kernels.rules import Gain
from diffray.workers.features.feature import Feature, Row

if TYPE_CHECKING:
    from diffray.workers.batch_plan import BatchPlan
    from diffray.workers.batch_state import BatchState

_NONE = Gain(0.0, 0.0, -1.0)


class Credit(Feature):
    """What the rows remember; the head adds it to their logits."""

    fused = True

    @classmethod
    def of(cls, plan: "BatchPlan") -> Self | None:
        return cls() if any(s.policy.decoder.gain() for s in plan.sequences) else None

    def begin(self, rows: "BatchState") -> None:
        self.credits = credits_of(rows.rows, rows.length, rows.device)

    def keep(self, rows: "BatchState") -> None:
        assert self.credits is not None, "begin comes first"
        for b, sequence in enumerate(rows.sequences):
            if sequence.policy.decoder.gain() is not None:
                n = sequence.block.length
                sequence.block.memory = Memory(*(part[b, :n, :n] for part in self.credits.memory))


def credits_of(rows: Items[Row], length: int, device: torch.device) -> Credits:
    """Return what the rows remember, one id per step of the block."""
    gains = [row.sequence.policy.decoder.gain() for row in rows]
    giving = [row.sequence for row, gain in zip(rows, gains, strict=True) if gain is not None]
    shape = length, max(s.block.length for s in giving)
    ids_LK = torch.full(shape, -1, device=device)
    blank = Memory(ids_LK, torch.zeros_like(ids_LK, dtype=torch.float64))
    kept = [row.sequence.block.memory or blank for row in rows]
    ids_BLK = torch.stack([_padded(memory.ids_BLK, shape, -1) for memory in kept])
    credit_BLK = torch.stack([_padded(memory.credit_BLK, shape, 0) for memory in kept])
    numbers_B3 = torch.tensor([gain or _NONE for gain in gains], dtype=torch.float64)
    gains_3B = send(numbers_B3.T.contiguous(), device)
    return Credits(Memory(ids_BLK, credit_BLK), Gains(*gains_3B.unbind()))


def _padded(part: Tensor, shape: tuple[int, int], other: int) -> Tensor:
    """Return a row's memory, padded to the shape of all rows."""
    if part.shape == shape:
        return part
    return pad(part, (0, shape[1] - part.shape[1], 0, shape[0] - part.shape[0]), value=other)
