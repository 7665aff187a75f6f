"""A copy: another canvas of a sequence, whose windows run in the same forwards as its own."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class Copy:
    """A row of canvases, and pages of its own where its K/V differ from the sequence's."""

    slot: int
    pages: list[int] = field(default_factory=list)
    pages_P: "Tensor | None" = None  # of its whole canvas, on the host
    covers: tuple[int, int, int] | None = None  # if lent for a while: the window of its pages
    ready: bool = False  # if lent for a while: whether the last forward made it
