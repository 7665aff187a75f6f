"""Pages of K/V in the host's memory, for prefixes that the device has no room for.

Letters: P pages, L layers, S positions of a page, G key heads, D head size.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from diffray.components.backend import SideStream, host_zeros, send


class HostPages:
    """Host memory, and the copies from and to the device that `Prefixes` decides on.

    Copies overlap the forwards and run in the order of the calls. The contents of device pages are
    set aside first, so forwards may overwrite these pages immediately. A forward launched after a
    copy to the device waits there for that copy.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        self._page_size, self.num_pages = page_size, num_pages
        self.stored_bytes = self.loaded_bytes = 0  # since the start
        self._device_PLSGD: list[Tensor] = []
        self._host_PLSGD: list[Tensor] = []
        self._side: SideStream | None = None

    def take_back(self, stores: Items[Tensor]) -> None:
        """Allocate memory for pages of `stores`: layers, then positions, then anything."""
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
        """Free the memory; its contents are lost."""
        self._device_PLSGD, self._host_PLSGD, self._side = [], [], None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._host_PLSGD)

    def store(self, pages: Mapping[int, int]) -> None:
        """Copy pages to the host; `pages` maps each host page to a device page."""
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
        """Copy pages to the device; `pages` maps each host page to a device page."""
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
