"""The ranks that hold one copy of the model: how they meet, which one this is, their collectives.

A worker group starts so: rank 0 opens a store and tells the others its port (`open_store`,
`join_store`), all connect, each loads its shard at its own pace, and `smallest` is where they wait
for each other.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not stubbed

Store: TypeAlias = TCPStore


class UnevenError(ValueError):
    """A length that cannot be cut over the ranks."""


def open_store(host: str, *, timeout: float) -> Store:
    """Open the store at which the ranks meet, on rank 0; `port` of the result is for the others.

    It listens at the address `host` alone, on a port that is free now, and is gone with this
    process. Whoever waits at it does so for `timeout` seconds, which must cover loading.
    """
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return Store(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, *, timeout: float) -> Store:
    """Find rank 0's store, on the other ranks."""
    return Store(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout))


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
    device: torch.device | None = None  # on which the group's tensors must be
    store: Store | None = None

    @staticmethod
    def connect(
        store: Store,
        rank: int,
        size: int,
        *,
        device: torch.device,
        timeout: float,
        expert_parallel: bool = False,
    ) -> "Mesh":
        """Join the process's one group, NCCL on CUDA, else gloo; all ranks must call it.

        The ranks come together as slowly as the store allows. From then on a collective that takes
        longer than `timeout` seconds fails, and the group with it: nothing can be repaired, so the
        processes are to be ended.
        """
        if size == 1:
            return Mesh(device=device)
        _say(store, "here", rank, 1)
        _hear(store, "here", size)
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("mesh", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
        return Mesh(rank, size, expert_parallel, dist.group.WORLD, device, store)

    def leave(self) -> None:
        """End the group, with all ranks alive; where one is dead, end the process instead."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def shard(self, length: int, what: str) -> tuple[int, int]:
        """Return this rank's half-open share of `length` equal parts."""
        if length % self.size:
            raise UnevenError(f"{what} ({length}) cannot be divided over {self.size} ranks")
        part = length // self.size
        return self.rank * part, (self.rank + 1) * part

    def spread(self, length: int, what: str) -> tuple[int, int]:
        """Return this rank's half-open share of `length`; shares may differ by one."""
        if length < self.size:
            raise UnevenError(f"{what} ({length}) cannot be divided over {self.size} ranks")
        return self.rank * length // self.size, (self.rank + 1) * length // self.size

    def smallest(self, name: str, value: int) -> int:
        """Return the least of the ranks' values of `name`, for which all ranks must ask.

        Ranks wait for each other as long as the store allows, unlike in a collective: one may have
        loaded its weights minutes before another.
        """
        if self.store is None:
            return value
        turn = self.store.add(f"{name}/{self.rank}/turn", 1)
        _say(self.store, f"{name}/{turn}", self.rank, value)
        return min(_hear(self.store, f"{name}/{turn}", self.size))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ranks' `x` stacked along a new first dimension, the same on every rank."""
        if self.size == 1:
            return x.unsqueeze(0)
        gathered = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(gathered.unbind()), x.contiguous(), group=self.group)
        return gathered

    def all_equal(self, x: Tensor) -> Tensor:
        """Return whether `x` is the same on all ranks, as a tensor: nothing waits for the device.

        For a checksum of what ranks must have in common, as `kernels/checksum.py` computes it.
        """
        everyone = self.all_gather(x)
        return (everyone == everyone[0]).all()


def _say(store: Store, name: str, rank: int, value: int) -> None:
    store.set(f"{name}/{rank}", str(value))


def _hear(store: Store, name: str, size: int) -> list[int]:
    """Wait until every rank has said its value, and return them."""
    values = []
    for rank in range(size):
        try:
            values.append(int(store.get(f"{name}/{rank}")))
        except dist.DistError as error:
            raise TimeoutError(
                f"rank {rank} of {size} did not come to {name!r} in time, or rank 0, at which the "
                f"ranks meet, is gone; look for the reason in those ranks' logs ({error})"
            ) from error
    return values
