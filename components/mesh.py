"""The ranks that hold one copy of the model: which one this is, and their collectives."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """A line of `size` ranks; tensor parallel always, and experts either cut or dealt out over it.

    With `expert_parallel` each rank holds whole experts, a contiguous slice of them; without it, a
    slice of every expert. A mesh of one rank needs no process group and every collective is free.
    """

    rank: int = 0
    size: int = 1
    expert_parallel: bool = False
    group: dist.ProcessGroup | None = None

    def shard(self, length: int, what: str) -> tuple[int, int]:
        """Return this rank's half-open share of `length` equal parts."""
        if length % self.size:
            raise ValueError(
                f"{what} ({length}) cannot be divided over {self.size} ranks; "
                f"use a tensor-parallel size that divides it"
            )
        part = length // self.size
        return self.rank * part, (self.rank + 1) * part

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ranks' `x` stacked along a new first dimension, the same on every rank."""
        if self.size == 1:
            return x.unsqueeze(0)
        gathered = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(gathered, x.contiguous(), group=self.group)
        return torch.stack(gathered)
