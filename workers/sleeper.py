"""Frees the memory of an idle engine in sleep, and allocates it again on waking.

Every tensor stays the same object, whose storage has no bytes in sleep, so references to the
model's tensors stay valid.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from diffray.components.backend import give_back_all, send
from diffray.components.kv_pool import KVPool
from diffray.workers.adapters import Adapters
from diffray.workers.graphs import Graphs
from diffray.workers.messages import AWAKE, WITHOUT_WEIGHTS


class Sleepy(Protocol):
    """A loaded model whose weights can leave the device."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def pack(self) -> None: ...

    def unpack(self) -> bool: ...


class Sleeper:
    """An engine's memory: level 1 of sleep frees the K/V, level 2 the weights too.

    At level 1 the weights leave a GPU for the host; on a CPU they stay where they are.
    """

    def __init__(
        self,
        model: Sleepy,
        kv: KVPool,
        graphs: Graphs | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._model, self._kv, self._graphs, self._adapters = model, kv, graphs, adapters
        self.level = AWAKE
        self._packed = False
        self._sizes: list[int] = []  # of the parameters' storages in sleep; empty if not freed
        self._copies: list[Tensor] = []  # of the parameters, on the host

    def sleep(self, level: int) -> None:
        """Free memory; a sleeping engine may go to a deeper level."""
        if level <= self.level:
            return
        was_awake = self.level == AWAKE
        self.level = level  # first, so that an interrupted call leaves it asleep
        if was_awake:
            self._kv.give_back()
            if self._graphs is not None:
                self._graphs.forget()  # they read the memory at its old address
        on_host = self._kv.device.type == "cpu"
        if level == WITHOUT_WEIGHTS or not on_host:
            self._take_weights(keep=level < WITHOUT_WEIGHTS)
        give_back_all(self._kv.device)

    def wake(self) -> None:
        """Allocate the memory again; after level 2 the weights have no values yet."""
        if self._sizes:
            for parameter, size in zip(self._parameters(), self._sizes, strict=True):
                parameter.untyped_storage().resize_(size)
        if self._copies:
            with torch.no_grad():
                for parameter, copy in zip(self._parameters(), self._copies, strict=True):
                    parameter.copy_(copy)
        self._sizes, self._copies = [], []
        self._kv.take_back()
        self.level = AWAKE

    def settle(self) -> None:
        """Prepare what depends on the weights, once these have their values."""
        if self._packed:
            self._model.pack()
        self._packed = False
        if self._graphs is not None:
            self._graphs.record()

    def _take_weights(self, *, keep: bool) -> None:
        """Free the parameters' storage; with `keep`, copy them to the host first."""
        if self._adapters is not None:
            self._adapters.forget()
        if not self._sizes:
            self._packed = self._model.unpack()
            storages = [each.untyped_storage() for each in self._parameters()]
            if keep:
                host = torch.device("cpu")
                self._copies = [send(each.detach(), host) for each in self._parameters()]
            self._sizes = [storage.nbytes() for storage in storages]
            for storage in storages:
                storage.resize_(0)
        elif not keep:
            self._copies = []

    def _parameters(self) -> list[nn.Parameter]:
        return list(self._model.parameters())
