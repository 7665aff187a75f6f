"""The interface of features: what some requests of a batch want done in each step, beyond the rest.

A feature is made for a batch in which a row uses it, and does nothing to other rows. The batch
calls its hooks in the order of `FEATURES` (order.py).
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.batch import Batch
from diffray.components.block import Block, Proposal
from diffray.components.copies import Copy
from diffray.components.logits import Logits
from diffray.components.propose import Chosen, Rows
from diffray.components.sequence import Sequence
from diffray.kernels.choose import Kernels
from diffray.kernels.confidence import Confidence
from diffray.workers.outcome import Outcome
from diffray.workers.slots import Slots

if TYPE_CHECKING:
    from diffray.workers.batch_plan import BatchPlan
    from diffray.workers.batch_state import BatchState
    from diffray.workers.head_plan import HeadPlan


class Row(NamedTuple):
    """A canvas of a sequence: its own, or a draft of it after some more steps."""

    sequence: Sequence
    copy: Copy | None = None
    ahead: int = 0  # steps

    @property
    def step(self) -> int:
        """The steps of its block before this round."""
        return self.sequence.block.step + self.ahead

    @property
    def slot(self) -> int:
        return self.sequence.slot if self.copy is None else self.copy.slot


def rows_of(sequences: Items[Sequence]) -> list[Row]:
    """Return the sequences' own rows, then those of all drafts."""
    copies = [Row(s, copy, number) for s in sequences for number, copy in enumerate(s.copies, 1)]
    return [*map(Row, sequences), *copies]


def copy_canvases(rows: Items[Row], slots: Slots) -> None:
    """Give new drafts their sequence's canvas."""
    new = [(row.sequence.slot, row.slot) for row in rows if row.copy and not row.copy.ready]
    if new:
        own_N, new_N = send(torch.tensor(new), slots.device).unbind(1)
        slots.ids_SN[new_N] = slots.ids_SN[own_N]
        slots.masked_SN[new_N] = False


@dataclass(slots=True)
class Acceptance:
    """A step's proposals and what is accepted of them; hooks may replace all but the masks."""

    proposal: Proposal
    block: Block
    accepted_BL: Tensor
    masked_BL: Tensor  # before the step


class StoredLogits(NamedTuple):
    """The head's outcome in a step, where logits are stored."""

    hidden_TH: Tensor  # of all tokens
    logits: Logits
    plan: "HeadPlan"
    block: Block
    done_B: Tensor  # rows that were done before
    step: int  # of the round


class Feature:
    """The rows of a batch that use a feature; each hook's default does nothing.

    Hooks are listed in about the order of a step. It calls `asks` and `adjust` if no logits are
    stored, otherwise `read`, `choose` and `inspect`.
    """

    # Whether one kernel may end a step without stored logits: `propose` to `done` do not run then.
    fused: ClassVar[bool] = False
    replayed: ClassVar[bool] = True  # whether recorded steps compute what it needs

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        """Return whether a sequence uses the feature."""
        return False

    @classmethod
    def of(cls, plan: "BatchPlan") -> Self | None:
        """Return the feature for a plan's sequences; None if none uses it."""
        return cls() if any(map(cls.uses, plan.sequences)) else None

    @staticmethod
    def waits(sequence: Sequence) -> bool:
        """Return whether the host must see a step's result before the next step."""
        return False

    def inputs(self, plan: "BatchPlan", x_TH: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """Change what the model reads."""
        return x_TH, batch

    def plan_head(self, head: "HeadPlan") -> None:
        """Plan what is done with the head's rows; it may come before `begin`.

        Other features may still claim blocks, so `head.rows` and `head.plain` are not known yet.
        """

    def needs_logits(self, head: "HeadPlan") -> bool:
        """Return whether the logits of the planned rows must be stored; all have planned."""
        return False

    def begin(self, rows: "BatchState") -> None:
        """Make tensors for the rows, whose canvases have not been read yet."""

    def show(self, rows: "BatchState", block: Block) -> Block:
        """Change what decoders see."""
        return block

    def asks(self, rows: Rows) -> Tensor | None:
        """Return ids for each row of the head whose logits are needed, where none are stored.

        At most one feature of a batch asks.
        """
        return None

    def adjust(self, found: Confidence, rows: Rows, block: Block, kernels: Kernels) -> Confidence:
        """Change the tokens that were found without storing logits, if a feature asked."""
        return found

    def read(self, plan: "BatchPlan", head: StoredLogits) -> None:
        """Read or change the logits of the head's rows, with those of the mask token."""

    def choose(self, chosen: Chosen) -> None:
        """Choose other tokens: replace `chosen.ids_R`, never write into it."""

    def inspect(self, chosen: Chosen, proposal: Proposal) -> Proposal:
        """Add to the proposal what the logits say; they are without the mask token now."""
        return proposal

    def propose(self, rows: "BatchState", step: Acceptance) -> None:
        """Change proposals before decoders see them."""

    def accept(self, rows: "BatchState", step: Acceptance) -> None:
        """Change what decoders have accepted."""

    def after(self, rows: "BatchState", step: Acceptance) -> None:
        """Follow up on accepted tokens, which are in the rows but not yet on their canvases."""

    def written(self, rows: "BatchState", step: Acceptance) -> None:
        """Follow up on the canvases, which hold the accepted tokens."""

    def done(self, rows: "BatchState", step: Acceptance, done_B: Tensor) -> Tensor:
        """Return which rows are done, given those without masks."""
        return done_B

    def keep(self, rows: "BatchState") -> None:
        """Save what unfinished blocks need under the next plan."""

    def report(self, outcomes: list[Outcome]) -> None:
        """Add to what is reported of each sequence, on the host."""
