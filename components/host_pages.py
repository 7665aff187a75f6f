"""Pages of K/V in the host's memory, for prefixes that the device has no room for.

Letters: P pages, L layers, S positions of a page, G key heads, D head size.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from diffray.components.backend import SideStream, host_zeros, send


class HostPages:
    """The memory, and the copies from and to the device; who decides on them is `Prefixes`.

    Copies run beside the forwards, and in the order of the calls. What the device's pages held is
    set aside first, so forwards may write on them at once. A forward that is launched after a
    copy back waits, on the device, until that has arrived.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        self._page_size, self.num_pages = page_size, num_pages
        self.stored_bytes = self.loaded_bytes = 0  # since the start
        self._device_PLSGD: list[Tensor] = []
        self._host_PLSGD: list[Tensor] = []
        self._side: SideStream | None = None

    def take_back(self, stores: Items[Tensor]) -> None:
        """Make the memory for the device's pages: layers, then positions, then anything."""
        if not self.num_pages:
            return
        self._device_PLSGD = [
            each.unflatten(1, (-1, self._page_size)).transpose(0, 1) for each in stores
        ]
        self._host_PLSGD = [
            host_zeros((self.num_pages, *each.shape[1:]), each.dtype, each.device)
            for each in self._device_PLSGD
        ]
        self._side = SideStream(stores[0].device)

    def give_back(self) -> None:
        """Free the memory; nothing in it is needed."""
        self._device_PLSGD, self._host_PLSGD, self._side = [], [], None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._host_PLSGD)

    def store(self, pages: Mapping[int, int]) -> None:
        """Copy to each page of the host the contents of one of the device."""
        if not pages or self._side is None:
            return
        for device_PLSGD, host_PLSGD in zip(self._device_PLSGD, self._host_PLSGD, strict=True):
            from_P = send(torch.tensor([*pages.values()]), device_PLSGD.device)
            aside_PLSGD = device_PLSGD.index_select(0, from_P)
            with self._side.after_forwards(aside_PLSGD):
                for page, contents_LSGD in zip(pages, aside_PLSGD, strict=True):
                    host_PLSGD[page].copy_(contents_LSGD, non_blocking=True)
            self.stored_bytes += aside_PLSGD.nbytes

    def load(self, pages: Mapping[int, int]) -> None:
        """Copy the contents of each page of the host to one of the device."""
        if not pages or self._side is None:
            return
        arriving = []
        for device_PLSGD, host_PLSGD in zip(self._device_PLSGD, self._host_PLSGD, strict=True):
            aside_PLSGD = device_PLSGD.new_empty(len(pages), *device_PLSGD.shape[1:])
            with self._side.after_forwards(aside_PLSGD):
                for page, contents_LSGD in zip(pages, aside_PLSGD, strict=True):
                    contents_LSGD.copy_(host_PLSGD[page], non_blocking=True)
            arriving.append(aside_PLSGD)
        self._side.before_forwards()
        for device_PLSGD, aside_PLSGD in zip(self._device_PLSGD, arriving, strict=True):
            onto_P = send(torch.tensor([*pages.values()]), device_PLSGD.device)
            device_PLSGD.index_copy_(0, onto_P, aside_PLSGD)
            self.loaded_bytes += aside_PLSGD.nbytes
