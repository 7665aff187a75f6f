"""Ranks as threads of this process, whose collectives are real."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from diffray.components.mesh import Mesh

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ThreadMesh(Mesh):
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    desk: dict[int, Tensor] = field(default_factory=dict)
    meetings: list[str] = field(default_factory=list)  # rank 0 notes each

    def all_gather(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            self.meetings.append("all_gather")
        self.desk[self.rank] = x
        self.barrier.wait()
        gathered = torch.stack([self.desk[rank] for rank in range(self.size)])
        self.barrier.wait()
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        x.copy_(self.all_gather(x.clone()).sum(0))
        return x


def over_ranks(
    size: int, expert_parallel: bool, work: Callable[[ThreadMesh], T]
) -> tuple[list[T], int]:
    """Run `work` as every rank at once; return the ranks' results and how often they met."""
    barrier, desk = threading.Barrier(size, timeout=60), dict[int, Tensor]()
    meetings: list[str] = []
    meshes = [
        ThreadMesh(rank, size, expert_parallel, barrier=barrier, desk=desk, meetings=meetings)
        for rank in range(size)
    ]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, meshes)), len(meetings)


def on_ranks(size: int, work: Callable[[ThreadMesh], T]) -> list[T]:
    return over_ranks(size, False, work)[0]
