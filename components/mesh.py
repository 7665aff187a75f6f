"""The ranks that hold one copy of the model: how they meet, which one this is, their collectives.

To start a worker group, rank 0 opens a store and publishes its port (`open_store`, `join_store`),
all ranks connect, and each loads its shard at its own pace. They wait for each other in `smallest`.
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

# Renamed after torch 2.11.
_gather_into_one = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class UnevenError(ValueError):
    """A length that cannot be divided over the ranks."""


def open_store(host: str, *, timeout: float) -> Store:
    """Open the ranks' store, on rank 0; the others connect to the result's `port`.

    It listens only on the address `host`, on a free port, and ends with this process. Ranks wait
    at it for up to `timeout` seconds, which must cover loading.
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
    """Connect to rank 0's store, on the other ranks."""
    return Store(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout))


@dataclass(frozen=True, slots=True)
class Mesh:
    """A line of `size` tensor-parallel ranks.

    With `expert_parallel` each rank holds a contiguous range of whole experts; without it, a slice
    of every expert. A mesh of one rank needs no process group, and its collectives are free.
    Without a group, one rank of several can run its shard of a model, but its sums are partial.
    """

    rank: int = 0
    size: int = 1
    expert_parallel: bool = False
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None  # the device of the group's tensors
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

        Ranks wait for each other as long as the store allows. Later, a collective that takes longer
        than `timeout` seconds fails, and the group with it: it cannot be repaired, so end the
        processes.
        """
        if size == 1:
            return Mesh(device=device)
        _say(store, "here", rank, "")
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
        """End the group while all ranks are alive; if one is dead, end the process instead."""
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

    def share(self, name: str, text: str) -> str:
        """Return rank 0's text of `name`; all ranks must call it, and wait as in `smallest`."""
        if self.store is None:
            return text
        topic = self._topic(self.store, name)
        if self.rank == 0:
            _say(self.store, topic, 0, text)
        return _hear(self.store, topic, 1)[0]

    def smallest(self, name: str, value: int) -> int:
        """Return the minimum of the ranks' values of `name`; all ranks must call it.

        Unlike in a collective, ranks wait for each other as long as the store allows: one may
        finish loading minutes before another.
        """
        if self.store is None:
            return value
        topic = self._topic(self.store, name)
        _say(self.store, topic, self.rank, str(value))
        return min(map(int, _hear(self.store, topic, self.size)))

    def _topic(self, store: Store, name: str) -> str:
        """Return a key that is new for each call and equal on all ranks."""
        return f"{name}/{store.add(f'{name}/{self.rank}/turn', 1)}"

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' `x`, which may be overwritten with it."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ranks' `x` stacked along a new first dimension, the same on every rank."""
        if self.size == 1:
            return x.unsqueeze(0)
        gathered = x.new_empty(self.size, *x.shape)
        # Gather into one tensor: for a list, NCCL would copy each rank's part once more.
        _gather_into_one(gathered.view(-1), x.reshape(-1), group=self.group)
        return gathered

    def all_equal(self, x: Tensor) -> Tensor:
        """Return, as a tensor, whether `x` is equal on all ranks, without waiting for the device.

        Used with the checksums of `kernels/checksum.py`.
        """
        everyone = self.all_gather(x)
        return (everyone == everyone[0]).all()


def _say(store: Store, name: str, rank: int, text: str) -> None:
    store.set(f"{name}/{rank}", text)


def _hear(store: Store, name: str, size: int) -> list[str]:
    """Wait until each of the first `size` ranks has published its text, and return them."""
    texts = []
    for rank in range(size):
        try:
            texts.append(store.get(f"{name}/{rank}").decode())
        except dist.DistError as error:
            raise TimeoutError(
                f"rank {rank} did not reach {name!r} in time, or rank 0, where the "
                f"ranks meet, is gone; look for the reason in those ranks' logs ({error})"
            ) from error
    return texts
