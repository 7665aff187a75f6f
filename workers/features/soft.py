"""Soft diffusion: masked inputs show what the model expects there.

Letters: T packed tokens, H hidden size, E soft positions, I of them in blocks, O outside, N rows
of a block, V this rank's vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.batch import Batch
from diffray.components.logits import Logits
from diffray.components.sequence import Sequence
from diffray.workers.draws import joined, repeated
from diffray.workers.features.feature import Feature, StoredLogits

if TYPE_CHECKING:
    from diffray.workers.batch_plan import BatchPlan
    from diffray.workers.head_plan import BlockRows, HeadPlan

_ROWS = 256  # whose probabilities over the vocabulary are in memory at a time


class Softened(NamedTuple):
    """The masks whose expected embeddings are stored, in the blocks and after them."""

    rows_I: Tensor  # in the blocks: rows of the head, which computes them anyway
    tokens_O: Tensor  # outside: index into the packed hidden states
    cells_E: Tensor  # both: flat index into the slots
    sequences_E: Tensor


class Soft(Feature):
    """Rows with soft inputs, which a recorded step would not read."""

    replayed = False

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.policy.iteration.soft

    @classmethod
    def of(cls, plan: "BatchPlan") -> Self | None:
        for s in plan.sequences:
            if s.policy.iteration.soft and s.policy.iteration.renoises and s.block.step == 0:
                plan.slots.soft.enter(s.slot, *s.soft_span)
        return super().of(plan)

    def inputs(self, plan: "BatchPlan", x_TH: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        if batch.masked_T1 is None:
            batch = replace(batch, masked_T1=plan.masked_of(batch))
        soft_TH = plan.slots.soft.read(batch.cells_T, x_TH)
        return plan.model.soften(x_TH, soft_TH, batch), batch

    def plan_head(self, head: "HeadPlan") -> None:
        """Collect the masks of the blocks, then those of the windows after them."""
        inside, outside, tokens, numbers = [], [], [], []
        soft = head.blocks_of(self)
        for block in soft:
            masked_N = block.sequence.block.masked[block.offsets_N]
            inside.append(block.rows_N[masked_N])
            tokens.append(_tokens(head, block, block.positions_N[masked_N]))
            numbers.append((inside[-1], block.number))
        for block in soft:
            window = head.layout.windows[block.number]
            start = block.sequence.block.stop
            stop = min(window.stop, block.sequence.canvas.blocks_stop)
            positions = torch.arange(start, max(stop, start))
            tokens.append(_tokens(head, block, positions))
            outside.append(tokens[-1] - block.sequence.spec.logit_shift)
            numbers.append((positions, block.number))
        for each in outside:
            head.read(each)
        self.masks = Softened(
            joined(inside, head.device),
            joined(outside, head.device),
            head.layout.batch.cells_T[joined(tokens, head.device)],
            repeated(numbers, torch.long, head.device),
        )

    def needs_logits(self, head: "HeadPlan") -> bool:
        return True

    def read(self, plan: "BatchPlan", head: StoredLogits) -> None:
        """Store the expected embeddings at masked positions, weighted for this step."""
        soft = self.masks
        weights = [
            s.policy.iteration.weight(s.steps_before + s.block.step + head.step)
            for s in plan.sequences
        ]
        # Only renoising averages over the distributions that tokens are drawn from.
        warmths = [
            s.temperature(s.block.step + head.step) if s.policy.iteration.renoises else 1.0
            for s in plan.sequences
        ]
        cells_E, row_E = soft.cells_E, soft.sequences_E
        warm_E = send(torch.tensor(warmths), plan.device)[row_E]
        expected_EH = torch.cat(list(self._expectations(plan, head, soft, warm_E)))
        weight_B = send(torch.tensor(weights, dtype=expected_EH.dtype), plan.device)
        active_E1 = ~head.done_B[row_E].unsqueeze(1)
        plan.slots.soft.write(cells_E, active_E1, expected_EH * weight_B[row_E].unsqueeze(1))

    def _expectations(
        self, plan: "BatchPlan", head: StoredLogits, soft: Softened, warm_E: Tensor
    ) -> Iterator[Tensor]:
        """Yield expected embeddings of some rows at a time, as there may be a whole canvas."""
        warm_I, warm_O = warm_E.split([len(soft.rows_I), len(soft.tokens_O)])
        for rows, warm in zip(soft.rows_I.split(_ROWS), warm_I.split(_ROWS), strict=True):
            values_EV = head.logits.values_RV.index_select(0, rows)
            yield self._expectation(plan, values_EV, warm)
        for at, warm in zip(soft.tokens_O.split(_ROWS), warm_O.split(_ROWS), strict=True):
            values_EV = plan.model.head(head.hidden_TH.index_select(0, at))
            yield self._expectation(plan, values_EV, warm)

    def _expectation(self, plan: "BatchPlan", values_EV: Tensor, warm_E: Tensor) -> Tensor:
        values_EV = values_EV / warm_E.unsqueeze(1).to(values_EV)
        logits = Logits(values_EV, plan.model.spec.vocab_start, plan.mesh)
        logits.values_RV.sub_(logits.logsumexp().unsqueeze(1)).exp_()
        return plan.model.expected_embedding(logits.values_RV)


def _tokens(head: "HeadPlan", block: "BlockRows", positions: Tensor) -> Tensor:
    """Return the packed tokens of some positions of a block's window."""
    layout = head.layout
    return layout.offsets[block.number] + positions - layout.windows[block.number].start
