"""What the files of a group share (tests/helpers/lanes.py): started for the first that asks.

A pytest plugin. Ray is imported where it is used, since other runs do without it.
"""

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.lanes import SHARED
from tests.helpers.served import CONFIG, Served, wait_until
from tools.serve_process import serve_process

CPUS = 6.0  # of the Ray


@cache
def start_ray() -> None:
    from tools.local_ray import local_cluster

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


@cache
def start_server(folder: Path) -> Served:
    SHARED.callback(start_server.cache_clear)
    (folder / "models.yaml").write_text(CONFIG.replace("FILES", str(folder / "files")))
    # No call between processes of one machine may go through a proxy.
    settings = {"http_proxy": "http://127.0.0.1:9"}
    models = str(folder / "models.yaml")
    running = SHARED.enter_context(serve_process("--config", models, settings=settings))
    running.wait_for("are ready at ", 1)
    return Served(running.process, running.folder, running.port)


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A server of two models (tests/helpers/served.py), with all its replicas."""
    folder = tmp_path_factory.getbasetemp()
    if (running := start_server(folder)).process.poll() is not None:
        start_server.cache_clear()
        running = start_server(folder)
    wait_until(lambda: set(running.health().values()) == {"healthy"})
    running.samples()
    return running
