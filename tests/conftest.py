"""Settings every test shares: one thread, no network, GPU tests only where there is a GPU.

The suite must pass on any processor and with any number of threads. To see it as another machine
would run it: `OMP_NUM_THREADS=16`, and `DIFFRAY_TEST_AUTO=bfloat16` for the dtype that "auto"
stands for in this process (AMX), or `float32`.
"""

import os
import signal

# Before torch is imported, here and in the processes that tests start: on few cores, many threads
# cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A run in the background of a script ignores Ctrl-C, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from hypothesis import settings

from diffray.components import backend

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
if (auto := os.environ.get("DIFFRAY_TEST_AUTO")) is not None:
    fast = {"float32": False, "bfloat16": True}[auto]
    backend.is_fast_at_bfloat16 = lambda device: fast

# The machine's load must not decide whether a property holds.
settings.register_profile("diffray", deadline=None, print_blob=True)
settings.load_profile("diffray")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu on a machine without a CUDA device; puts files with slow ones first.

    These wait for Ray and for deadlines, which would leave a processor idle at the end of a run.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
