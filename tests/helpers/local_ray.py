"""A Ray of our own for a test module: its own temporary folder and free ports, always shut down."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "diffray.cluster.serve.ingress:middlewares",
}
MEMORY = 100_000_000  # bytes of a node's object store; Ray allows no less


@contextmanager
def local_ray(cpus: int = 8, dashboard_port: int | None = None) -> Iterator[None]:
    """Start a one-node Ray with logical cores; the machine may have fewer."""
    with ray_environment({}) as folder:
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=0,
            include_dashboard=dashboard_port is not None,
            dashboard_port=dashboard_port,
            _temp_dir=folder,
            object_store_memory=MEMORY,
            log_to_driver=True,
        )
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def local_cluster(
    nodes: list[dict[str, Any]], settings: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Start a Ray of several nodes on this machine, each with the resources that it claims."""
    with ray_environment(settings or {}):
        cluster = Cluster()
        try:
            for node in nodes:
                cluster.add_node(include_dashboard=False, object_store_memory=MEMORY, **node)
            ray.init(address=cluster.address, log_to_driver=True)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextmanager
def ray_environment(more: Mapping[str, str]) -> Iterator[str]:
    """Set the environment for a while, with a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        wanted = {**SETTINGS, **more, "RAY_TMPDIR": folder}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield folder
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
