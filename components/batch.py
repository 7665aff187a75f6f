"""The work of one forward: windows of several sequences, packed one after the other.

Letters: T packed tokens, R of them that are read, B windows of one attention group, Q queries,
K keys, W windows, P pages of a window.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffray.components.backend import send
from diffray.components.low_rank import Adapted
from diffray.kernels.windows import Group, PagedWindows, Windows


@dataclass(frozen=True, slots=True)
class Window:
    """Positions [start, stop) of one sequence, to run now.

    If `block` is 0, every query sees the keys [0, kv_stop); otherwise attention is block-causal,
    and a query sees the keys up to the end of its own block of that length, at most kv_stop. In
    layers that see only near keys, the reach counts back from the start of the query's block or
    window; if `block` is -1, as in an image, from the query itself.
    """

    start: int
    stop: int
    kv_stop: int
    block: int
    pages_P: Tensor  # pages of the sequence's K/V, on the host
    canvas: int = 0  # the canvas cell of its sequence's first position
    open: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.kv_stop

    @property
    def causal(self) -> bool:
        """Whether some query sees only a part of the keys."""
        return self.block > 0 and self.start // self.block < (self.kv_stop - 1) // self.block

    @property
    def facts(self) -> tuple[int, int, int, int, int, int]:
        first_open = min(max(self.open, self.start), self.stop)
        return self.start, self.stop, self.kv_stop, self.block, first_open, self.canvas


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed windows in the given order, which must be sorted by shape."""

    positions_T: Tensor
    slots_T: Tensor  # where each token's K/V is stored
    cells_T: Tensor  # each token's cell on the canvases
    windows: Windows
    read_R: Tensor | None = None  # the tokens whose hidden states are used; None: all of them
    masked_T1: Tensor | None = None  # which tokens are masks, for models that treat them specially
    adapted: tuple[Adapted, ...] = ()  # the tokens that use LoRA adapters

    @staticmethod
    def pack(windows: Items[Window], device: torch.device, page_size: int) -> "Batch":
        """Build the index tensors that every layer of this forward shares."""
        packed = PackedWindows(windows, device, page_size)
        positions_T, slots_T, cells_T = send(packed.places_3T, device)
        return Batch(positions_T, slots_T, cells_T, packed)


class PackedWindows:
    """Windows on the host; the two forms for attention are built on demand."""

    def __init__(self, windows: Items[Window], device: torch.device, page_size: int) -> None:
        self._windows, self._device, self._page_size = windows, device, page_size
        facts = torch.tensor([w.facts for w in windows], dtype=torch.long).view(-1, 6).unbind(1)
        self._start_W, self._stop_W, self._kv_stop_W, self._block_W, *others = facts
        self._open_W, self._canvas_W = others
        self._lengths_W = self._stop_W - self._start_W
        self._first_W = self._lengths_W.cumsum(0) - self._lengths_W
        pages = [window.pages_P for window in windows] or [torch.zeros(0, dtype=torch.long)]
        self._pages_WP = pad_sequence(pages, batch_first=True)
        self._near: dict[int, tuple[Group, ...]] = {}

    @property
    def places_3T(self) -> Tensor:
        """Each token's position, K/V slot and canvas cell, on the host."""
        window_T, position_T = self._window_T, self._position_T
        page_T = self._pages_WP[window_T, position_T // self._page_size]
        slot_T = page_T * self._page_size + position_T % self._page_size
        return torch.stack([position_T, slot_T, self._canvas_W[window_T] + position_T])

    @cached_property
    def _window_T(self) -> Tensor:
        return torch.arange(len(self._lengths_W)).repeat_interleave(self._lengths_W)

    @cached_property
    def _position_T(self) -> Tensor:
        window_T = self._window_T
        return torch.arange(len(window_T)) + (self._start_W - self._first_W)[window_T]

    @cached_property
    def open_T(self) -> Tensor | None:
        if torch.equal(self._open_W, self._start_W):
            return None
        return send(self._position_T >= self._open_W[self._window_T], self._device)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        return self._groups(None)

    def near(self, reach: int) -> tuple[Group, ...]:
        if reach not in self._near:
            self._near[reach] = self._groups(reach)
        return self._near[reach]

    def _groups(self, reach: int | None) -> tuple[Group, ...]:
        groups, start, first = [], 0, 0
        for (queries, keys), run in groupby(self._windows, key=lambda w: w.shape):
            same = list(run)
            rows = slice(first, first + len(same))
            keys_BK = mask_BQK = None
            at_BQ = self._start_W[rows].unsqueeze(1) + torch.arange(queries)
            begin_BQ, begin = None, 0  # of the keys
            if reach is not None:
                begin_BQ = begins_of(at_BQ, self._block_W[rows], self._start_W[rows], reach)
                begin = int(begin_BQ.min())
            if queries < keys:
                keys_BK = slots_of(self._pages_WP[rows], keys, self._page_size)[:, begin:]
                keys_BK = send(keys_BK, self._device)
            if any(w.causal for w in same) or (begin_BQ is not None and bool(begin_BQ.any())):
                ends_BQ = ends_of(at_BQ, self._block_W[rows], self._kv_stop_W[rows])
                seen_BQK = seen_keys(torch.arange(begin, keys), begin_BQ, ends_BQ)
                mask_BQK = send(seen_BQK, self._device)
            places = send(own_places(at_BQ - begin, keys - begin), self._device)
            groups.append(Group(start, len(same), queries, keys_BK, mask_BQK, places))
            start, first = start + len(same) * queries, rows.stop
        return tuple(groups)

    @cached_property
    def paged(self) -> PagedWindows:
        first_W = torch.cat([self._first_W, self._first_W[-1:] + self._lengths_W[-1:]])
        facts = self._start_W, self._kv_stop_W, self._block_W, self._open_W, self._stop_W
        first_W, start_W, kv_stop_W, block_W, open_W, stop_W, table = _together(
            [first_W, *facts, self._pages_WP.flatten()], self._device
        )
        pages_WP, longest = table.view(self._pages_WP.shape), int(self._lengths_W.max())
        found = first_W, start_W, kv_stop_W, block_W, open_W, stop_W, pages_WP
        return PagedWindows(*found, self._page_size, longest)


def slots_of(pages_BP: Tensor, keys: int, page_size: int) -> Tensor:
    """Return the slots of the positions [0, keys) of sequences with these pages."""
    keys_K = torch.arange(keys, device=pages_BP.device)
    return pages_BP.long()[:, keys_K // page_size] * page_size + keys_K % page_size


def ends_of(at_BQ: Tensor, block_B: Tensor, kv_stop_B: Tensor) -> Tensor:
    """Return where the keys end that queries at these positions see."""
    block_B1, kv_stop_B1 = block_B.unsqueeze(1), kv_stop_B.unsqueeze(1)
    own_BQ = torch.minimum((at_BQ // block_B1.clamp(min=1) + 1) * block_B1, kv_stop_B1)
    return torch.where(block_B1 > 0, own_BQ, kv_stop_B1)


def begins_of(at_BQ: Tensor, block_B: Tensor, start_B: Tensor, reach: int) -> Tensor:
    """Return the first key that queries at these positions see in layers with this reach."""
    block_B1 = block_B.unsqueeze(1)
    own_BQ = torch.where(block_B1 > 0, at_BQ // block_B1.clamp(min=1) * block_B1, start_B[:, None])
    own_BQ = torch.where(block_B1 < 0, at_BQ, own_BQ)
    return (own_BQ - (reach - 1)).clamp(min=0)


def seen_keys(keys_K: Tensor, begin_BQ: Tensor | None, ends_BQ: Tensor) -> Tensor:
    """Return which of the keys at these positions each query sees [B, Q, K]."""
    seen_BQK = keys_K < ends_BQ.unsqueeze(-1)
    return seen_BQK if begin_BQ is None else seen_BQK & (keys_K >= begin_BQ.unsqueeze(-1))


def own_places(at_BQ: Tensor, keys: int) -> Tensor:
    """Return each query's index into the keys of its group, stored window after window."""
    first_B1 = torch.arange(len(at_BQ), device=at_BQ.device).unsqueeze(1) * keys
    return (first_B1 + at_BQ).flatten()


def _together(parts: Items[Tensor], device: torch.device) -> list[Tensor]:
    """Copy integers to the device as int32, in one transfer.

    Each part is aligned to 16 bytes; for other alignments Triton would compile again.
    """
    rooms = [-(-len(part) // 4) * 4 for part in parts]
    moved = torch.zeros(sum(rooms), dtype=torch.int32)
    for room, part in zip(moved.split(rooms), parts, strict=True):
        room[: len(part)] = part
    places = send(moved, device).split(rooms)
    return [place[: len(part)] for place, part in zip(places, parts, strict=True)]
