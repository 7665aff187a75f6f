"""The host memory for prefixes: its size, whether it pays, and counts of what it holds."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from diffray.components.backend import finish
from diffray.components.batch import Batch, Window
from diffray.components.container import available_memory
from diffray.components.kv_pool import KVPool
from diffray.components.mesh import Mesh
from diffray.components.model import Model
from diffray.workers.stats import PrefixStats

log = logging.getLogger(__name__)

_TRIALS = 2


def host_pages_for(swap_space: float, page_bytes: int) -> int:
    """Return how many K/V pages fit this many GiB of host memory."""
    wanted, free = int(swap_space * 2**30), available_memory()
    if wanted > free:
        raise ValueError(f"swap_space is {wanted} bytes, but the host has {free} free; lower it")
    if 0 < wanted < page_bytes:
        raise ValueError(f"swap_space is {wanted} bytes, less than a K/V page ({page_bytes})")
    return wanted // page_bytes


def settle_host(kv: KVPool, model: Model, mesh: Mesh, positions: int) -> None:
    """Use the host for prefixes only if copying them takes less time than recomputing them.

    Both grow with the length of a prefix, so one length decides for all. All ranks must call this;
    they decide together.
    """
    if not kv.host.num_pages:
        return
    copied_s, ran_s = _copying_s(kv, positions), _running_s(kv, model, positions)
    if mesh.smallest("copying prefixes pays", int(copied_s < ran_s)):
        return
    kv.use_no_host()
    if mesh.rank == 0:
        log.warning(
            "swap_space is not used: copying %d positions to the host and back takes %.1f ms, "
            "and recomputing them %.1f ms",
            *(positions, 1e3 * copied_s, 1e3 * ran_s),
        )


def prefix_stats(kv: KVPool) -> PrefixStats:
    """Return how much memory prefixes take, and counts since the start."""
    prefixes, page = kv.prefixes, kv.page_bytes
    return PrefixStats(
        device_bytes=(prefixes.num_device + kv.first_steps.num_pages) * page,
        host_bytes=prefixes.num_host * page,
        host_capacity=kv.host.nbytes,
        host_queries=prefixes.host_queries,
        host_hits=prefixes.host_hits,
        stored_bytes=kv.host.stored_bytes,
        loaded_bytes=kv.host.loaded_bytes,
    )


def _copying_s(kv: KVPool, positions: int) -> float:
    """Return the seconds to copy the K/V of this many positions to the host and back."""
    count = min(kv.pages_for(positions), kv.host.num_pages)
    pages = dict.fromkeys(range(count), 0)  # the page that padding writes to

    def copy() -> None:
        kv.host.store(pages)
        kv.host.load(pages)

    seconds = _shortest_s(kv, copy) * kv.pages_for(positions) / count
    kv.host.stored_bytes = kv.host.loaded_bytes = 0
    return seconds


@torch.inference_mode()
def _running_s(kv: KVPool, model: Model, positions: int) -> float:
    """Return the seconds of a forward over this many positions of one sequence."""
    spec, pages_P = model.spec, torch.zeros(kv.pages_for(positions), dtype=torch.long)
    block = 1 if spec.encodes else spec.block_length
    ids_T = torch.zeros(positions, dtype=torch.long, device=kv.device)

    def run() -> None:
        window = Window(0, positions, positions, block, pages_P)
        batch = Batch.pack([window], kv.device, kv.page_size)
        if spec.encodes:
            batch = replace(batch, masked_T1=torch.zeros_like(ids_T).bool().unsqueeze(1))
        model.forward(model.embed(ids_T), batch, kv)

    return _shortest_s(kv, run)


def _shortest_s(kv: KVPool, work: Callable[[], None]) -> float:
    """Return the seconds of the fastest trial after a warm-up; all ranks run equally many."""
    taken = []
    for _ in range(1 + _TRIALS):
        begin = time.perf_counter()
        work()
        finish(kv.device)
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
