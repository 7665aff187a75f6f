"""What LoRA adapters add to a matrix, for those tokens of a batch that ask for it.

Letters: T packed tokens, I input columns, O output rows, R the adapter's rank.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import linear

from diffray.components.lora import LoRA


class Adapted(NamedTuple):
    """The packed tokens of a batch that one adapter is for."""

    lora: LoRA
    tokens_A: Tensor


class Running:
    """The adapters of the forward that runs; all matrices of a model share it."""

    def __init__(self) -> None:
        self.adapted: tuple[Adapted, ...] = ()


class Delta(NamedTuple):
    """up @ down, which is added to the output rows from `start` on."""

    down_RI: Tensor
    up_OR: Tensor
    start: int


class LowRank:
    """What each loaded adapter adds to one matrix; most adapt some matrices only."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.deltas: dict[LoRA, list[Delta]] = {}

    def add(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Add to a product of the matrix; rows of other requests are not touched."""
        for lora, tokens_A in self._running.adapted:
            if (deltas := self.deltas.get(lora)) is None:
                continue
            x_AI = x_TI.index_select(0, tokens_A)
            for down_RI, up_OR, start in deltas:
                rows_TO = y_TO[:, start : start + len(up_OR)]
                rows_TO.index_add_(0, tokens_A, linear(linear(x_AI, down_RI), up_OR))
        return y_TO
