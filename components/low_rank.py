"""What LoRA adapters add to a matrix, for the tokens of a batch that use them.

Letters: T packed tokens, A those of one adapter, P those of them that one expert gets, I input
columns, O output rows, R the adapter's rank.
"""

from functools import cached_property
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import linear

from diffray.components.lora import LoRA
from diffray.kernels.cpu.rows import LowRankSum


class Adapted(NamedTuple):
    """The packed tokens of a batch that use one adapter."""

    lora: LoRA
    tokens_A: Tensor
    span: slice | None = None  # the same, where they follow one another

    def of(self, x_TI: Tensor) -> Tensor:
        return x_TI.index_select(0, self.tokens_A) if self.span is None else x_TI[self.span]

    def add(self, y_TO: Tensor, more_AO: Tensor) -> None:
        if self.span is None:
            y_TO.index_add_(0, self.tokens_A, more_AO)
        else:
            y_TO[self.span].add_(more_AO)


class Running:
    """The adapters of the current forward; all matrices of a model share this object."""

    def __init__(self) -> None:
        self.adapted: tuple[Adapted, ...] = ()


class Delta(NamedTuple):
    """Both matrices of a product that is added to the output columns from `start` on."""

    down_RI: Tensor
    up_RO: Tensor
    start: int

    def of(self, x_TI: Tensor) -> Tensor:
        return linear(x_TI, self.down_RI) @ self.up_RO

    def rows(self, y_TO: Tensor) -> Tensor:
        return y_TO[:, self.start : self.start + self.up_RO.shape[1]]


class Deltas(list[Delta]):
    """What an adapter adds to one matrix."""

    @cached_property
    def program(self) -> LowRankSum:
        return LowRankSum(self)


class LowRank:
    """What each loaded adapter adds to a matrix, or to those of experts, keyed by expert."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.deltas: dict[LoRA, dict[int, Deltas]] = {}

    @property
    def adapted(self) -> list[Adapted]:
        """The tokens of the current forward whose adapters change this product."""
        return [each for each in self._running.adapted if each.lora in self.deltas]

    def add(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Add to a product of the matrix; rows of other requests are not touched."""
        for each in self._running.adapted:
            deltas = self.deltas.get(each.lora, {}).get(0, ())
            if not deltas or deltas.program.add(y_TO, x_TI, each.tokens_A):
                continue
            x_AI = each.of(x_TI)
            for delta in deltas:
                each.add(delta.rows(y_TO), delta.of(x_AI))
        return y_TO

    def add_to_expert(self, y_PO: Tensor, x_PI: Tensor, lora: LoRA, expert: int) -> None:
        """Add to an expert's product in place; all rows are the adapter's."""
        for delta in self.deltas.get(lora, {}).get(expert, ()):
            delta.rows(y_PO).add_(delta.of(x_PI))
