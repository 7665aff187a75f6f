"""What the files of a group share (tests/helpers/lanes.py): started for the first that asks.

A pytest plugin. Ray is imported where it is used, since other runs do without it.
"""

import time
from collections.abc import Iterator
from functools import cache

import pytest

from tests.helpers.lanes import SHARED

CPUS = 6.0  # of the Ray


@cache
def start_ray() -> None:
    from benchmarks.local_ray import local_cluster

    SHARED.callback(start_ray.cache_clear)
    SHARED.enter_context(local_cluster([{"num_cpus": CPUS}]))


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[None]:
    """A Ray of six processors, which each file leaves as free as it found it."""
    import ray

    start_ray()
    yield
    end = time.monotonic() + 60
    while (free := ray.available_resources()).get("CPU") != CPUS:
        assert time.monotonic() < end, free
        time.sleep(0.1)
