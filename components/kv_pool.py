"""Paged memory for keys and values.

Letters: S slots (P pages * page size), T packed tokens, N query, key and value heads, G key heads,
D head size.
"""

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from diffray.components.backend import send, zeros
from diffray.components.batch import Batch
from diffray.components.prefixes import Prefixes
from diffray.kernels.attention import KVLayer, QKRotary
from diffray.kernels.choose import TORCH, Kernels


class KVPool:
    """The K/V of all sequences on this rank; page 0 is never allocated: padding writes to it.

    `prefixes` keeps released pages for reuse, and gives them up when others need them.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels = TORCH,
        share_prefixes: bool = True,
    ) -> None:
        shape = (num_layers, num_pages * page_size, num_heads, head_dim)
        self.kernels = kernels
        self.page_size = page_size
        self.num_pages = num_pages
        self.keys_LSGD = zeros(shape, dtype, device)
        self.values_LSGD = zeros(shape, dtype, device)
        self.layers = [
            KVLayer(*pair) for pair in zip(self.keys_LSGD, self.values_LSGD, strict=True)
        ]
        self.prefixes = Prefixes(page_size, enabled=share_prefixes)
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free) + self.prefixes.num_idle

    def pages_for(self, length: int) -> int:
        """Return how many pages `length` positions take."""
        return -(-length // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Allocate pages; the caller has checked `num_free`."""
        assert num_pages <= self.num_free, "more pages needed than are free"
        while num_pages > len(self._free):
            self.free(self.prefixes.give_up())
        return [self._free.pop() for _ in range(num_pages)]

    def free(self, pages: list[int]) -> None:
        """Free pages; their contents become invalid."""
        self._free.extend(reversed(pages))

    def forget_prefixes(self) -> None:
        """Give up all stored prefixes that no sequence holds."""
        while self.prefixes.num_idle:
            self.free(self.prefixes.give_up())

    def copy(self, pages: Items[int], onto: Items[int]) -> None:
        """Copy the contents of pages onto others, in place."""
        moved_2P = send(torch.tensor([pages, onto]), self.keys_LSGD.device)
        for kept_LSGD in (self.keys_LSGD, self.values_LSGD):
            paged_LPSGD = kept_LSGD.unflatten(1, (self.num_pages, self.page_size))
            paged_LPSGD.index_copy_(1, moved_2P[1], paged_LPSGD.index_select(1, moved_2P[0]))

    def attend(self, layer: int, heads_TND: Tensor, rotary: QKRotary, batch: Batch) -> Tensor:
        """Rotate query and key heads, store K/V in place, then return the attention output.

        A token's query heads come first, then key heads, then value heads.
        """
        kv = self.layers[layer]
        return self.kernels.attend(heads_TND, rotary, kv, batch.slots_T, batch.windows)
