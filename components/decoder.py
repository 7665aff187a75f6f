"""What a decoder is: which of the model's proposals become final.

Letters: B rows, L positions of a block.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from diffray.components.block import Block, Proposal
from diffray.components.config import PolicyPart
from diffray.kernels.acceptance import Rule
from diffray.kernels.credit import Gain

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class Decoder(PolicyPart, ABC):
    """A decoding rule and its numbers. Subclasses say `kind` and `accept`, seldom more."""

    edits: ClassVar[bool] = False  # may replace tokens that are already written
    has_threshold: ClassVar[bool] = False  # honours `block.floor_B`
    whole_slots: ClassVar[bool] = False  # decides slots of pinned canvases by `proposal.value_BL`
    measures: ClassVar[bool] = False  # reads `proposal.measures`, for which logits are written

    kind: str  # subclasses have one value

    @abstractmethod
    def accept(self, proposal: Proposal, block: Block) -> Tensor:
        """Return which proposed tokens become final, [B, L].

        Only masked positions count, and editable ones where the decoder edits. Rows that would
        get none are given their most confident one by the engine, so that every step counts.
        """

    def gain(self) -> Gain | None:
        """Return how it gives credit to ids that keep coming out on top, if it does."""
        return None

    def shares(self, sequence: "Sequence") -> Items[int]:
        """Return how many positions each step of the current block takes, if it is known before.

        They become `block.plans`. Together they are the block's masks.
        """
        return ()

    def rule(self, sequence: "Sequence") -> Rule | None:
        """Return the same as `accept` in numbers that a kernel reads, for the current block.

        None: only `accept` can tell.
        """
        return None

    def lookahead(self) -> int:
        """Return how many branches a forward tries beside the row's canvas, if there is room."""
        return 0

    def settle_steps(self) -> int:
        """Return how many steps may follow after a block's last mask is gone.

        `Sequence.most_post_steps` bounds it, whatever a request asks for.
        """
        return 0

    def last_step(self) -> int | None:
        """Return which step of a block is its last one if masks last until then, if any is."""
        return None
