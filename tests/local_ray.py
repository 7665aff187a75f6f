"""A Ray of our own for a test module: its own temporary folder and free ports, always shut down."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def local_ray(cpus: int = 8) -> Iterator[None]:
    """Start a one-node Ray with logical cores; the machine may have fewer."""
    settings = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=0,
            include_dashboard=False,
            _temp_dir=folder,
            object_store_memory=100_000_000,
            log_to_driver=True,
        )
        try:
            yield
        finally:
            ray.shutdown()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
