"""The interface of row transforms: what a request asks for, and what a batch does for all of them.

A request carries a tuple of them, in the order in which they are applied. Those of one kind are
planned and applied together for a whole batch.
Letters: R rows of the head, S slots, N positions of the longest canvas.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.logits import Logits

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class Where(NamedTuple):
    """The rows of one request, on the host."""

    rows: slice
    positions_R: Tensor  # that the rows are about
    sequence: "Sequence"

    @property
    def rows_R(self) -> Tensor:
        return torch.arange(self.rows.start, self.rows.stop)


class Step(NamedTuple):
    """What transforms may read besides the logits: the canvases before the step."""

    ids_SN: Tensor
    masked_SN: Tensor


class Planned(ABC):
    """The transforms of one kind, as tensors."""

    @classmethod
    def join(cls, parts: Items[Self], device: torch.device) -> Self:
        """Return the parts as one, on the device."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # a dataclass
        return cls(*(send(torch.cat([getattr(p, n) for p in parts]), device) for n in names))

    @abstractmethod
    def apply(self, logits: Logits, step: Step) -> None:
        """Change the logits in place."""


class RowTransform(Protocol):
    """What one request asks for."""

    def plan(self, where: Where) -> Planned | None:
        """Return the change to the request's rows, on the host, or None if there is none."""
        ...
