"""One forward's worth of work: windows of several sequences, packed one after the other.

Letters: T packed tokens, R of them that are read, B windows of one attention group, Q queries,
K keys, N positions of a sequence, W windows, P pages of a window.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.kernels.windows import Group, PagedWindows, Windows


@dataclass(frozen=True, slots=True)
class Window:
    """Positions [start, stop) of one sequence, to run now; query t sees the keys [0, kv_end(t)).

    `block` is 0 where every query sees [0, kv_stop); otherwise attention is block-causal, and a
    query sees the keys up to the end of its own block of that length, at most kv_stop.
    """

    start: int
    stop: int
    kv_stop: int
    block: int
    slots_N: Tensor  # pool slot of each position of the sequence

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.kv_stop

    @property
    def causal(self) -> bool:
        """Whether some query sees less than all keys."""
        return self.block > 0 and self.start // self.block < (self.kv_stop - 1) // self.block

    def kv_end(self) -> Tensor:
        """Return, for each query, the end of the keys that it sees."""
        positions = torch.arange(self.start, self.stop)
        if self.block == 0:
            return torch.full_like(positions, self.kv_stop)
        return ((positions // self.block + 1) * self.block).clamp(max=self.kv_stop)


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed windows; the order is that of the windows given, which must stand sorted by shape."""

    positions_T: Tensor
    slots_T: Tensor  # where each token's K/V is stored
    windows: Windows
    read_R: Tensor | None = None  # the tokens whose hidden states are used; None: all of them

    @staticmethod
    def pack(windows: Items[Window], device: torch.device, page_size: int = 1) -> "Batch":
        """Build the index tensors that every layer of this forward shares.

        Slots stand in pages of `page_size`; of 1, where nothing is known of pages.
        """
        positions = torch.cat([torch.arange(w.start, w.stop) for w in windows])
        slots = torch.cat([w.slots_N[w.start : w.stop] for w in windows])
        packed = PackedWindows(windows, device, page_size)
        return Batch(positions.to(device), slots.to(device), packed)


class PackedWindows:
    """Windows on the host; of the two forms for attention, one is made when it is asked for."""

    def __init__(self, windows: Items[Window], device: torch.device, page_size: int) -> None:
        self._windows, self._device, self._page_size = windows, device, page_size

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        groups, start = [], 0
        for (queries, keys), run in groupby(self._windows, key=lambda w: w.shape):
            same = list(run)
            keys_BK = mask_BQK = None
            if queries < keys:
                keys_BK = torch.stack([w.slots_N[:keys] for w in same]).to(self._device)
            if any(w.causal for w in same):
                ends_BQ = torch.stack([w.kv_end() for w in same])
                mask_BQK = (torch.arange(keys) < ends_BQ.unsqueeze(-1)).to(self._device)
            groups.append(Group(start, len(same), queries, keys_BK, mask_BQK))
            start += len(same) * queries
        return tuple(groups)

    @cached_property
    def paged(self) -> PagedWindows:
        windows, size = self._windows, self._page_size
        lengths = [w.stop - w.start for w in windows]
        pages = pad_sequence([first_slots(w, size) // size for w in windows], batch_first=True)
        facts = torch.tensor([(w.start, w.kv_stop, w.block) for w in windows])
        first = torch.tensor([0, *accumulate(lengths)])
        parts = [first, *facts.unbind(1), pages.flatten()]
        first_W, start_W, kv_stop_W, block_W, table = _together(parts, self._device)
        pages_WP = table.view(pages.shape)
        return PagedWindows(first_W, start_W, kv_stop_W, block_W, pages_WP, size, max(lengths))


def first_slots(window: Window, page_size: int) -> Tensor:
    """Return the first slot of each page of the keys that a window sees."""
    return window.slots_N[: window.kv_stop : page_size]


def _together(parts: Items[Tensor], device: torch.device) -> list[Tensor]:
    """Return the integers as int32 on the device, in one copy.

    Each part begins at a multiple of 16 bytes: Triton compiles anew for one that does not.
    """
    rooms = [-(-len(part) // 4) * 4 for part in parts]
    moved = torch.zeros(sum(rooms), dtype=torch.int32)
    for room, part in zip(moved.split(rooms), parts, strict=True):
        room[: len(part)] = part
    places = moved.to(device).split(rooms)
    return [place[: len(part)] for place, part in zip(places, parts, strict=True)]
