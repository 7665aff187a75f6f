"""Paged memory for keys and values.

Letters: S slots (P pages * page size), T packed tokens, N query, key and value heads, G key heads,
D head size.
"""

from collections.abc import Sequence as Items
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffray.components.backend import send, zeros
from diffray.components.batch import Batch
from diffray.components.host_pages import HostPages
from diffray.components.prefixes import Node, Prefixes
from diffray.kernels.attention import KVLayer, QKRotary, attend_ready
from diffray.kernels.choose import TORCH, Kernels

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class KVPool:
    """The K/V of all sequences on this rank; page 0 is never allocated: padding writes to it.

    `prefixes` keeps released pages for reuse, and gives them up when others need them. What they
    hold then moves to one of `host_pages`, if there are any.
    """

    def __init__(
        self,
        *,
        shapes: Items[tuple[int, int]],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels = TORCH,
        share_prefixes: bool = True,
        host_pages: int = 0,
        prefix_ttl: float | None = None,
    ) -> None:
        """`shapes` are each layer's key heads and their size; layers of one shape lie together."""
        self.kernels = kernels
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype, self.device = dtype, device
        self._shapes = tuple(shapes)
        self.host = HostPages(page_size, host_pages)
        self.take_back()
        self.prefixes = Prefixes(
            page_size, enabled=share_prefixes, host_pages=host_pages, ttl=prefix_ttl
        )
        self._free = list(range(num_pages - 1, 0, -1))

    def take_back(self) -> None:
        """Make the memory: at first, and after it was given back."""
        shapes, positions = self._shapes, self.num_pages * self.page_size
        self.stores = {
            shape: _zeros((shapes.count(shape), positions, *shape), self.dtype, self.device)
            for shape in dict.fromkeys(shapes)
        }
        left = {shape: zip(*store, strict=True) for shape, store in self.stores.items()}
        self.layers = [KVLayer(*next(left[shape])) for shape in shapes]
        self.host.take_back([*chain(*self.stores.values())])

    def give_back(self) -> None:
        """Free the memory, which no sequence may use; the stored prefixes are forgotten."""
        self.forget_prefixes()
        self.stores, self.layers = {}, []
        self.host.give_back()

    @property
    def keys_LSGD(self) -> Tensor:
        """The keys of all layers, which must have one shape."""
        ((keys_LSGD, _),) = self.stores.values()
        return keys_LSGD

    @property
    def values_LSGD(self) -> Tensor:
        """The values of all layers, which must have one shape."""
        ((_, values_LSGD),) = self.stores.values()
        return values_LSGD

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for store in self.stores.values() for kept in store)

    @property
    def page_bytes(self) -> int:
        return self.nbytes // self.num_pages

    @property
    def num_free(self) -> int:
        return len(self._free) + self.prefixes.num_idle

    def pages_for(self, length: int) -> int:
        """Return how many pages `length` positions take."""
        return -(-length // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Allocate pages; the caller has checked `num_free`."""
        assert num_pages <= self.num_free, "more pages needed than are free"
        moved: dict[int, int] = {}  # which page each page of the host takes the contents of
        while num_pages > len(self._free):
            pages, host_pages = self.prefixes.give_up()
            moved.update(zip(host_pages, pages, strict=False))
            self.free(pages)
        self.host.store(moved)
        return [self._free.pop() for _ in range(num_pages)]

    def hold(self, sequence: "Sequence", found: list[Node]) -> None:
        """Give a sequence the pages of a prefix as its first; the caller has made room.

        What is on the host is copied back.
        """
        host_pages = self.prefixes.take(found)
        pages = self.allocate(len(host_pages))
        self.host.load(dict(zip(host_pages, pages, strict=True)))
        self.prefixes.hold(sequence, found, pages)

    def free(self, pages: list[int]) -> None:
        """Free pages; their contents become invalid."""
        self._free.extend(reversed(pages))

    def forget_prefixes(self) -> None:
        """Give up all stored prefixes that no sequence holds."""
        self.free(self.prefixes.forget())

    def pass_time(self, now: float) -> None:
        """Forget the prefixes that have not been used for too long; a clock never goes back."""
        prefixes = self.prefixes
        prefixes.now = max(prefixes.now, now)
        self.free(prefixes.forget(prefixes.now - prefixes.ttl))

    def use_no_host(self) -> None:
        """Give the host's memory back, and use none from now on."""
        self.prefixes.use_no_host()
        self.host.num_pages = 0
        self.host.give_back()

    def copy(self, pages: Items[int], onto: Items[int]) -> None:
        """Copy the contents of pages onto others, in place."""
        moved_2P = send(torch.tensor([pages, onto]), self.device)
        for kept_LSGD in chain(*self.stores.values()):
            paged_LPSGD = kept_LSGD.unflatten(1, (self.num_pages, self.page_size))
            paged_LPSGD.index_copy_(1, moved_2P[1], paged_LPSGD.index_select(1, moved_2P[0]))

    def attend(self, layer: int, heads_TND: Tensor, rotary: QKRotary, batch: Batch) -> Tensor:
        """Rotate query and key heads, store K/V in place, then return the attention output.

        A token's query heads come first, then key heads, then value heads.
        """
        kv = self.layers[layer]
        return self.kernels.attend(heads_TND, rotary, kv, batch.slots_T, batch.windows)

    def attend_near(
        self,
        layer: int,
        heads: tuple[Tensor, Tensor, Tensor],
        batch: Batch,
        *,
        reach: int | None,
        scale: float,
    ) -> Tensor:
        """Do the same with ready queries, keys and values; with a reach, queries see no farther.

        Torch computes it, whatever the kernels are.
        """
        windows = batch.windows
        groups = windows.groups if reach is None else windows.near(reach)
        return attend_ready(*heads, self.layers[layer], batch.slots_T, groups, scale)


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    return zeros(shape, dtype, device), zeros(shape, dtype, device)
