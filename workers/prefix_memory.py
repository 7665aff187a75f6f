"""The host memory for prefixes: its size, and counts of what it holds."""

from diffray.components.container import available_memory
from diffray.components.kv_pool import KVPool
from diffray.workers.stats import PrefixStats


def host_pages_for(swap_space: float, page_bytes: int) -> int:
    """Return how many K/V pages fit this many GiB of host memory."""
    wanted, free = int(swap_space * 2**30), available_memory()
    if wanted > free:
        raise ValueError(f"swap_space is {wanted} bytes, but the host has {free} free; lower it")
    if 0 < wanted < page_bytes:
        raise ValueError(f"swap_space is {wanted} bytes, less than a K/V page ({page_bytes})")
    return wanted // page_bytes


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
