"""Settings every test shares: one thread, no network, GPU tests only where there is a GPU.

The suite must pass on any processor and with any number of threads. These variables show it as
another machine would run it (`make test-processors`), also in all processes that tests start:
OMP_NUM_THREADS; DIFFRAY_TEST_AUTO, the dtype that "auto" stands for, bfloat16 (AMX) or float32;
ATEN_CPU_CAPABILITY (avx2, default) and ONEDNN_MAX_CPU_ISA for older processors.
"""

import inspect
import os
import sys

# Before torch is imported, here and in the processes that tests start: on few cores, many threads
# cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if "DIFFRAY_TEST_AUTO" in os.environ:
    from tests.helpers.processors import sitecustomize

    sys.path.insert(0, os.path.dirname(sitecustomize.__file__))
    before = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], *before])

import httpx2
import pytest
import torch
from hypothesis import settings

from tools.signals import as_in_a_terminal

pytest_plugins = tuple(
    f"tests.helpers.{name}" for name in ("coroutines", "lanes", "second_try", "shared")
)

as_in_a_terminal()
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# The machine's load must not decide whether a property holds.
settings.register_profile("diffray", deadline=None, print_blob=True)
settings.load_profile("diffray")
# All clients of httpx2 that are given no timeout share this one, of 5 seconds.
timeout = inspect.signature(httpx2.Client).parameters["timeout"].default
timeout.connect = timeout.read = timeout.write = timeout.pool = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
