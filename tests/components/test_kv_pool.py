"""K/V memory: zeros at the start, and on a CPU no more of it real than has been written."""

import pytest
import torch

from diffray.components.kv_pool import KVPool
from tests.helpers.own_process import in_own_process
from tests.helpers.updatable_toy import resident_bytes

MIB = 1 << 20


def pool(num_pages: int) -> KVPool:
    return KVPool(
        shapes=[(2, 128)] * 2, num_pages=num_pages, page_size=256, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip


def test_a_pool_begins_with_zeros() -> None:
    """Positions that are masked out are multiplied too: what stands there must be a number."""
    made = pool(3)
    assert made.keys_LSGD.shape == made.values_LSGD.shape == (2, 768, 2, 128)
    assert not made.keys_LSGD.any() and not made.values_LSGD.any()


@pytest.mark.long
def test_what_is_not_written_takes_no_memory() -> None:
    in_own_process(write_a_pool)


def write_a_pool() -> None:
    before = resident_bytes()
    made = pool(1024)
    assert resident_bytes() - before < 64 * MIB
    made.keys_LSGD.fill_(1.0)
    assert resident_bytes() - before > 448 * MIB
    assert made.keys_LSGD.sum().item() == made.keys_LSGD.numel()
    del made
    assert resident_bytes() - before < 64 * MIB
