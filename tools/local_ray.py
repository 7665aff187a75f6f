"""A private Ray cluster for tests: its own temporary folder and free ports, always shut down."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

from diffray.cluster.control.ray_settings import kill_rays_since
from diffray.workers.process import children
from tools.serve_process import starting_ray

SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "diffray.cluster.serve.proxy:middlewares",
}
MEMORY = 100_000_000  # bytes of a node's object store; Ray allows no less
# Of each node. By default the agent listens on a fixed port, which other Ray clusters here use.
OPTIONS: dict[str, Any] = {
    "include_dashboard": False,
    "dashboard_agent_listen_port": 0,
    "object_store_memory": MEMORY,
}


@contextmanager
def local_cluster(
    nodes: list[dict[str, Any]], settings: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Start a Ray cluster on this machine, whose nodes claim the given resources."""
    with ray_environment(settings or {}):
        before = children()
        try:
            cluster = _started(nodes)
        except Exception as error:  # Ray has no type for it
            if "timed out" not in str(error).lower():
                raise
            kill_rays_since(before)
            cluster = _started(nodes)  # a busy machine took longer than Ray's 30 s
        try:
            ray.init(address=cluster.address, log_to_driver=True)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


def _started(nodes: list[dict[str, Any]]) -> Cluster:
    cluster = Cluster()
    try:
        with starting_ray():
            for node in nodes:
                cluster.add_node(**OPTIONS | node)
        return cluster
    except BaseException:
        cluster.shutdown()
        raise


@contextmanager
def ray_environment(more: Mapping[str, str]) -> Iterator[None]:
    """Set the environment in the `with` block, with a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        wanted = {**SETTINGS, **more, "RAY_TMPDIR": folder}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
