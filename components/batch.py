"""One forward's worth of work: windows of several sequences, packed one after the other.

Letters: T packed tokens, R of them that are read, B windows of one attention group, Q queries,
K keys, N positions of a sequence.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from diffray.kernels.attention import Group


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
    groups: tuple[Group, ...]
    read_R: Tensor | None = None  # the tokens whose hidden states are used; None: all of them

    @staticmethod
    def pack(windows: Items[Window], device: torch.device) -> "Batch":
        """Build the index tensors that every layer of this forward shares."""
        positions = torch.cat([torch.arange(w.start, w.stop) for w in windows])
        slots = torch.cat([w.slots_N[w.start : w.stop] for w in windows])
        groups, start = [], 0
        for (queries, keys), run in groupby(windows, key=lambda w: w.shape):
            same = list(run)
            keys_BK = mask_BQK = None
            if queries < keys:
                keys_BK = torch.stack([w.slots_N[:keys] for w in same]).to(device)
            if any(w.causal for w in same):
                ends_BQ = torch.stack([w.kv_end() for w in same])
                mask_BQK = (torch.arange(keys) < ends_BQ.unsqueeze(-1)).to(device)
            groups.append(Group(start, len(same), queries, keys_BK, mask_BQK))
            start += len(same) * queries
        return Batch(positions.to(device), slots.to(device), tuple(groups))
