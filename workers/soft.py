"""What soft diffusion adds to masked inputs, for the canvases of running soft requests alone.

Letters: T packed tokens, C positions of all soft canvases, H hidden size, S slots.
"""

import torch
from torch import Tensor

from diffray.components.backend import send


class SoftInputs:
    """Embeddings at each position of some slots' canvases; elsewhere they are zero.

    It holds as many rows as those canvases have positions, and none while no soft request runs.
    They are at most `most_rows`, which hold one canvas at least; None sets no bound.
    """

    def __init__(self, num_canvases: int, slot_length: int, device: torch.device) -> None:
        self._num_canvases, self._slot_length, self._device = num_canvases, slot_length, device
        self.most_rows: int | None = None
        self._lengths: dict[int, int] = {}  # of each soft slot's canvas
        self._fresh: set[int] = set()  # slots that have not been given memory yet
        self._parts: dict[int, slice] = {}  # where each slot's rows are
        self._rows_CH: Tensor | None = None  # the first one stays zero: all other positions read it
        self._first_S: Tensor | None = None  # the row of each slot's first position

    @property
    def num_rows(self) -> int:
        """How many positions there is memory for."""
        return 0 if self._rows_CH is None else len(self._rows_CH)

    def has_room(self, length: int) -> bool:
        """Whether the memory takes one more canvas of this length."""
        return self.most_rows is None or sum(self._lengths.values()) + length <= self.most_rows

    def enter(self, slot: int, length: int) -> None:
        """Begin with zeros at all positions of a slot's canvas."""
        self._lengths[slot] = length
        self._fresh.add(slot)

    def leave(self, slot: int) -> None:
        """Forget a slot; its memory is given back."""
        if self._lengths.pop(slot, None) is None:
            return
        self._fresh.discard(slot)
        if not self._lengths:
            self._rows_CH = self._first_S = None
            self._parts = {}

    def read(self, cells_T: Tensor, like_TH: Tensor) -> Tensor:
        """Return what is added at some cells of the slots, in the dtype of `like_TH`."""
        self._arrange(like_TH)
        assert self._rows_CH is not None
        return self._rows_CH[self._rows(cells_T)]

    def write(self, cells_E: Tensor, active_E1: Tensor, values_EH: Tensor) -> None:
        """Store values at some cells of soft slots, where they are active."""
        assert self._rows_CH is not None, "soft inputs are written after they were read"
        rows_E = self._rows(cells_E)
        values_EH = values_EH.to(self._rows_CH)
        self._rows_CH[rows_E] = torch.where(active_E1, values_EH, self._rows_CH[rows_E])

    def _rows(self, cells_T: Tensor) -> Tensor:
        assert self._first_S is not None
        first_T = self._first_S[cells_T // self._slot_length]
        return torch.where(first_T > 0, first_T + cells_T % self._slot_length, 0)

    def _arrange(self, like_TH: Tensor) -> None:
        """Make the memory fit the slots that are soft now; those that stay keep what they have."""
        if (
            self._rows_CH is not None
            and not self._fresh
            and self._parts.keys() == self._lengths.keys()
        ):
            return
        old_CH, old = self._rows_CH, self._parts
        count = 1 + sum(self._lengths.values())
        self._rows_CH = like_TH.new_zeros(count, like_TH.shape[1])
        self._parts, begin = {}, 1
        firsts = [0] * self._num_canvases
        for slot, length in self._lengths.items():
            self._parts[slot] = slice(begin, begin + length)
            if slot not in self._fresh and old_CH is not None:
                self._rows_CH[self._parts[slot]] = old_CH[old[slot]]
            firsts[slot], begin = begin, begin + length
        self._first_S = send(torch.tensor(firsts), self._device)
        self._fresh.clear()
