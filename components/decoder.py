"""What a decoder is: which of the model's proposals become final.

Letters: B rows, L positions of a block.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, ClassVar

from diffray.components.config import PolicyPart
from diffray.kernels.rules import Gain, Rule

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal
    from diffray.components.sequence import Sequence


class Decoder(PolicyPart, ABC):
    """A decoding rule and its numbers. Subclasses define `kind` and `accept`, rarely more."""

    edits: ClassVar[bool] = False  # may replace tokens that are already written
    has_threshold: ClassVar[bool] = False  # honours `block.floor_B`
    whole_slots: ClassVar[bool] = False  # decides slots of pinned canvases by `proposal.value_BL`
    counts_canvas: ClassVar[bool] = False  # its `steps` are those of the whole canvas
    measures: ClassVar[bool] = False  # reads `proposal.measures`, which needs stored logits

    kind: str  # subclasses have one value

    @abstractmethod
    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        """Return which proposed tokens become final, [B, L].

        Only masked positions count, and editable ones if the decoder edits. For a row without any,
        the engine accepts the most confident token, so that every step makes progress.
        """

    def gain(self) -> Gain | None:
        """Return how the decoder credits ids that keep being the best, if it does."""
        return None

    def shares(self, sequence: "Sequence") -> Items[int]:
        """Return how many positions each step of the current block decides, if known in advance.

        They become `block.plans`. Their sum is the number of masks in the block.
        """
        return ()

    def rule(self, sequence: "Sequence") -> Rule | None:
        """Return `accept` as numbers that a kernel reads, for the current block.

        None if only `accept` can express it.
        """
        return None

    def settle_steps(self) -> int:
        """Return how many steps may follow once a block has no masks.

        `Sequence.most_post_steps` bounds it, whatever a request asks for.
        """
        return 0

    def last_step(self) -> int | None:
        """Return the step that ends a block if masks remain until then; None if no step does."""
        return None
