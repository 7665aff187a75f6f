"""What soft diffusion adds to masked inputs, held only for the canvases of running soft requests.

Letters: T packed tokens, C positions with soft inputs, H hidden size, S slots.
"""

import torch
from torch import Tensor

from diffray.components.backend import send


class SoftInputs:
    """Embeddings at some positions of some slots' canvases; elsewhere they are zero.

    There is a row for each such position, and no memory while no soft request runs. `most_rows`
    bounds the rows and holds at least one canvas; None sets no bound.
    """

    def __init__(self, num_canvases: int, slot_length: int, device: torch.device) -> None:
        self._num_canvases, self._slot_length, self._device = num_canvases, slot_length, device
        self.most_rows: int | None = None
        self._spans: dict[int, tuple[int, int]] = {}  # the positions of each soft slot
        self._fresh: set[int] = set()  # slots that must start with zeros
        self._parts: dict[int, slice] = {}  # where each slot's rows are
        self._rows_CH: Tensor | None = None  # the first one stays zero: all other positions read it
        self._places_S3: Tensor | None = None  # each slot's first row, its position, and the end

    @property
    def num_rows(self) -> int:
        """The number of positions that there is memory for."""
        return 0 if self._rows_CH is None else len(self._rows_CH)

    @property
    def _num_wanted(self) -> int:
        return sum(stop - start for start, stop in self._spans.values())

    def has_room(self, length: int) -> bool:
        """Whether this many more positions fit the memory."""
        return self.most_rows is None or self._num_wanted + length <= self.most_rows

    def enter(self, slot: int, start: int, stop: int) -> None:
        """Start with zeros at the positions [start, stop) of a slot's canvas."""
        self._spans[slot] = start, stop
        self._fresh.add(slot)

    def leave(self, slot: int) -> None:
        """Forget a slot, and free its memory."""
        if self._spans.pop(slot, None) is None:
            return
        self._fresh.discard(slot)
        if not self._spans:
            self._rows_CH = self._places_S3 = None
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
        assert self._places_S3 is not None
        first_T, start_T, stop_T = self._places_S3[cells_T // self._slot_length].unbind(1)
        position_T = cells_T % self._slot_length
        inside_T = (position_T >= start_T) & (position_T < stop_T)
        return torch.where(inside_T, first_T + position_T - start_T, 0)

    def _arrange(self, like_TH: Tensor) -> None:
        """Make the memory fit the slots that are soft now; slots that stay keep their values."""
        same = self._rows_CH is not None and self._parts.keys() == self._spans.keys()
        if same and not self._fresh:
            return
        old_CH, old = self._rows_CH, self._parts
        self._parts, begin = {}, 1
        places = [(0, 0, 0)] * self._num_canvases
        for slot, (start, stop) in self._spans.items():
            self._parts[slot] = slice(begin, begin + stop - start)
            places[slot] = begin, start, stop
            begin += stop - start
        if old_CH is None or old != self._parts:
            self._rows_CH = like_TH.new_zeros(begin, like_TH.shape[1])
            for slot in self._parts.keys() - self._fresh:
                assert old_CH is not None
                self._rows_CH[self._parts[slot]] = old_CH[old[slot]]
        else:  # another block with as many positions starts in the same rows
            for slot in self._fresh:
                old_CH[self._parts[slot]] = 0
        self._places_S3 = send(torch.tensor(places), self._device)
        self._fresh.clear()
