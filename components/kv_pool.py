"""Paged memory for keys and values.

Letters: S slots (P pages * page size), T packed tokens, N query, key and value heads, G key heads,
D head size.
"""

from collections.abc import Sequence as Items
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from diffray.components.backend import send, zeros
from diffray.components.batch import Batch
from diffray.components.first_steps import FirstSteps
from diffray.components.host_pages import HostPages
from diffray.components.prefixes import Node, Prefixes
from diffray.kernels.attention import KVLayer, QKRotary, attend_ready
from diffray.kernels.choose import TORCH, Kernels
from diffray.kernels.formats import KV_FORMATS, Format
from diffray.kernels.quantized_kv import QuantizedKV, Rounded, quantized_attend_ready

Shape = tuple[int, int]  # of a layer: the number of its key heads, and their size
Part = tuple[tuple[int, ...], torch.dtype]  # of one tensor of a layer, per position


def kv_format(name: str, shapes: Items[Shape]) -> Format | None:
    """Return the format of this name, None for `auto`; refuse one that the heads do not fit."""
    form = KV_FORMATS.get(name)
    if form is not None and form.group:
        for _, size in shapes:
            if size % form.group:
                raise ValueError(
                    f"kv_cache_dtype {name!r} has a scale for each {form.group} numbers of a head, "
                    f"and this model's heads have {size}; choose int8 or auto"
                )
    return form


def position_bytes(shapes: Items[Shape], dtype: torch.dtype, form: Format | None) -> int:
    """Return how many bytes a position's K/V take in all layers."""
    parts = (part for shape in shapes for part in _parts(shape, dtype, form))
    return sum(prod(shape) * kept.itemsize for shape, kept in parts)


def _parts(shape: Shape, dtype: torch.dtype, form: Format | None) -> list[Part]:
    """Return a layer's tensors per position: keys and values, or numbers and pairs of each."""
    heads, size = shape
    if form is None:
        return [(shape, dtype)] * 2
    numbers = (heads, size * form.bits // 8), torch.uint8
    return [numbers, ((heads, form.scales_of(size), 2), torch.bfloat16)] * 2


if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class Sharing(NamedTuple):
    """What requests may read of others."""

    prefixes: bool = True
    host_pages: int = 0  # for prefixes that leave the device
    ttl: float | None = None  # seconds after which an unused prefix is forgotten
    first_steps: str = "off"  # or exact, or approx


PREFIXES: Final = Sharing()


class KVPool:
    """The K/V of all sequences on this rank; page 0 is never allocated: padding writes to it.

    `prefixes` keeps released pages for reuse and evicts them when others need them. Their contents
    then move to host pages, if there are any. `first_steps` evicts its pages too.
    """

    def __init__(
        self,
        *,
        shapes: Items[Shape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        form: Format | None = None,
        kernels: Kernels = TORCH,
        sharing: Sharing = PREFIXES,
    ) -> None:
        """Store layers of one shape together; without a format, keep K/V in the dtype."""
        self.kernels = kernels
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype, self.device, self.form = dtype, device, form
        self._shapes = tuple(shapes)
        self.host = HostPages(page_size, sharing.host_pages)
        self.take_back()
        self.prefixes = Prefixes(
            page_size, enabled=sharing.prefixes, host_pages=sharing.host_pages, ttl=sharing.ttl
        )
        self.first_steps = FirstSteps(
            page_size,
            enabled=sharing.first_steps != "off",
            approximates=sharing.first_steps == "approx",
        )
        self.unused = list(range(num_pages - 1, 0, -1))  # pages without contents

    def take_back(self) -> None:
        """Allocate the memory, at first and after `give_back`."""
        shapes, positions = self._shapes, self.num_pages * self.page_size
        # In every format, a page has the same slots in each of these tensors.
        self.stores = {
            shape: tuple(
                zeros((shapes.count(shape), positions, *part), kept, self.device)
                for part, kept in _parts(shape, self.dtype, self.form)
            )
            for shape in dict.fromkeys(shapes)
        }
        left = {shape: zip(*store, strict=True) for shape, store in self.stores.items()}
        self.layers = [self._layer(*next(left[shape])) for shape in shapes]
        self.host.take_back([*chain(*self.stores.values())])

    def _layer(self, *parts: Tensor) -> KVLayer | QuantizedKV:
        if self.form is None:
            return KVLayer(*parts)
        return QuantizedKV(self.form, Rounded(*parts[:2]), Rounded(*parts[2:]))

    def give_back(self) -> None:
        """Free the memory, which no sequence may use, and forget the stored prefixes."""
        self.forget_prefixes()
        self.stores, self.layers = {}, []
        self.host.give_back()

    @property
    def keys_LSGD(self) -> Tensor:
        """The keys of all layers, which must have one shape and no format."""
        ((keys_LSGD, _),) = self.stores.values()
        return keys_LSGD

    @property
    def values_LSGD(self) -> Tensor:
        """The values of all layers, which must have one shape and no format."""
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
        return len(self.unused) + self.prefixes.num_idle + self.first_steps.num_pages

    def pages_for(self, length: int) -> int:
        """Return how many pages `length` positions take."""
        return -(-length // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Allocate pages; the caller has checked `num_free`."""
        assert num_pages <= self.num_free, "more pages needed than are free"
        moved: dict[int, int] = {}  # host page -> the page whose contents it takes
        while num_pages > len(self.unused) and self.first_steps.num_pages:
            self.free(self.first_steps.give_up())
        while num_pages > len(self.unused):
            pages, host_pages = self.prefixes.give_up()
            moved.update(zip(host_pages, pages, strict=False))
            self.free(pages)
        self.host.store(moved)
        return [self.unused.pop() for _ in range(num_pages)]

    def hold(self, sequence: "Sequence", found: list[Node]) -> None:
        """Give a sequence the pages of a prefix as its first ones; the caller has made room.

        Pages on the host are copied back.
        """
        host_pages = self.prefixes.take(found)
        pages = self.allocate(len(host_pages))
        self.host.load(dict(zip(host_pages, pages, strict=True)))
        self.prefixes.hold(sequence, found, pages)

    def free(self, pages: list[int]) -> None:
        """Free pages; their contents become invalid."""
        self.unused.extend(reversed(pages))

    def forget_prefixes(self) -> None:
        """Evict all stored prefixes that no sequence holds, and all first steps."""
        self.free(self.prefixes.forget())
        self.free(self.first_steps.forget())

    def pass_time(self, now: float) -> None:
        """Evict the prefixes that were unused for `ttl` seconds; the clock never goes back."""
        prefixes = self.prefixes
        prefixes.now = max(prefixes.now, now)
        self.free(prefixes.forget(prefixes.now - prefixes.ttl))

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
        kv, where = self.layers[layer], (batch.slots_T, batch.windows)
        if isinstance(kv, KVLayer):
            return self.kernels.attend(heads_TND, rotary, kv, *where)
        return self.kernels.quantized_attend(heads_TND, rotary, kv, *where)

    def attend_near(
        self,
        layer: int,
        heads: tuple[Tensor, Tensor, Tensor],
        batch: Batch,
        *,
        reach: int | None,
        scale: float,
    ) -> Tensor:
        """Do the same with finished queries, keys and values; `reach` limits how far queries see.

        Torch computes it, whatever the kernels are.
        """
        windows, kv = batch.windows, self.layers[layer]
        groups = windows.groups if reach is None else windows.near(reach)
        if isinstance(kv, KVLayer):
            return attend_ready(*heads, kv, batch.slots_T, groups, scale)
        return quantized_attend_ready(*heads, kv, batch.slots_T, groups, windows.open_T, scale)
