"""The memory of rows whose decoders give credit, from one plan to the next.

Letters: B rows, L positions of the longest block, K positions of the longest block with credit,
R rows of the head.
"""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffray.components.backend import send
from diffray.components.block import Block
from diffray.components.logits import Logits
from diffray.components.propose import Rows
from diffray.components.sequence import Sequence
from diffray.kernels.choose import Kernels
from diffray.kernels.confidence import Confidence
from diffray.kernels.credit import Credits, Gains, Memory, remember
from diffray.kernels.rules import Gain
from diffray.workers.features.feature import Feature, Row, StoredLogits

if TYPE_CHECKING:
    from diffray.workers.batch_plan import BatchPlan
    from diffray.workers.batch_state import BatchState
    from diffray.workers.head_plan import HeadPlan

_NONE = Gain(0.0, 0.0, -1.0)


class Credit(Feature):
    """What the rows remember; the head adds it to their logits."""

    fused = True

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.policy.decoder.gain() is not None

    def begin(self, rows: "BatchState") -> None:
        self.mask_token_id = rows.slots.mask_token_id
        self.credits = credits_of(rows.rows, rows.length, rows.device)

    def needs_logits(self, head: "HeadPlan") -> bool:
        return head.rows.draws is not None

    def asks(self, rows: Rows) -> Tensor | None:
        return self.credits.known(rows.cells_R)

    def adjust(self, found: Confidence, rows: Rows, block: Block, kernels: Kernels) -> Confidence:
        about = self.credits, rows.cells_R, block.masked_BL
        return kernels.reward(found, *about, self.mask_token_id)

    def read(self, plan: "BatchPlan", head: StoredLogits) -> None:
        add_credit(head.logits, self.credits, head.plan.rows, head.block)

    def keep(self, rows: "BatchState") -> None:
        for b, sequence in enumerate(rows.sequences):
            if sequence.policy.decoder.gain() is not None:
                n = sequence.block.length
                sequence.block.memory = Memory(*(part[b, :n, :n] for part in self.credits.memory))


def add_credit(logits: Logits, credits: Credits, rows: Rows, block: Block) -> None:
    """Remember the rows' best ids, and add the credit of all remembered ones in place."""
    best_R, best_ids_R = logits.best()
    logprob_R = best_R - logits.logsumexp()
    about = rows.cells_R, block.masked_BL
    ids_RK, values_RK = remember(credits, *about, best_ids_R, logprob_R)
    rows_RK = torch.arange(len(ids_RK), device=ids_RK.device).unsqueeze(1).expand_as(ids_RK)
    logits.add(rows_RK, ids_RK.clamp(min=0), values_RK)


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
