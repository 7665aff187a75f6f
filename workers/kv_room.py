"""How much memory an engine gives its K/V, and how many pages that is; `diffray plan` asks too."""

from typing import NamedTuple

import torch

from diffray.components.kv_pool import kv_format, position_bytes
from diffray.components.model_spec import ModelSpec
from diffray.workers.engine_options import EngineOptions

_SHARE_FOR_KV = 0.5  # of the memory that is free once the weights are loaded


class KVRoom(NamedTuple):
    """The memory for K/V of a rank, and the size of a page."""

    memory: int
    page: int

    @property
    def num_pages(self) -> int:
        return self.memory // self.page + 1  # page 0 is never handed out


def page_bytes(spec: ModelSpec, dtype: torch.dtype, setup: EngineOptions) -> int:
    """Return the size of a page in all layers of a rank."""
    form = kv_format(setup.kv_cache_dtype, spec.kv_shapes)
    return position_bytes(spec.kv_shapes, dtype, form) * setup.page_size


def kv_room(free: int, page: int, setup: EngineOptions, length: int, ranks: int = 1) -> KVRoom:
    """Return the room for K/V of one of the `ranks` that share `free` bytes.

    Unless `kv_cache_memory` says how much, at most enough for every slot.
    """
    memory = setup.kv_cache_memory
    if memory is None:
        share = int(max(free, 0) * _SHARE_FOR_KV) // ranks
        # A guided request holds two canvases.
        memory = min(share, 2 * setup.max_num_seqs * -(-length // setup.page_size) * page)
    return KVRoom(memory, page)
