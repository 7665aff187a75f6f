"""Serve applications over several nodes of one machine."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from ray import serve
from ray._private.state import actors

from diffray.cluster.serve.config_file import Application, applications
from diffray.cluster.serve.server import deploy
from tests.helpers.local_ray import local_cluster
from tests.helpers.serve_process import free_port

NODES = 4


MESSAGES: Any = [{"role": "user", "content": "What is 12 plus 30?"}]


# Serve hears of a replica's load every 10 s, and it forgets metrics for as long.
QUICK = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Start four nodes with room for one replica of one rank each."""
    with local_cluster([{"num_cpus": 2}] * NODES, QUICK):
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()


def application(name: str, **options: Any) -> tuple[Application, ...]:
    engine = {"device": "cpu", "cpu_threads": 1} | options.pop("engine_kwargs", {})
    loading = {"model_id": name, "model_source": "demo"}
    given = {"model_loading_config": loading, "engine_kwargs": engine, "route_prefix": f"/{name}"}
    return applications(given | options, name)


def start(wanted: tuple[Application, ...]) -> float:
    """Deploy, and return the seconds that it took."""
    begin = time.monotonic()
    deploy(wanted, print, threading.Event())
    return time.monotonic() - begin


def alive(kind: str) -> dict[int, str]:
    """Return the actors of a class that live: process and node."""
    return {
        actor["Pid"]: actor["Address"]["NodeID"]
        for actor in actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"].startswith(kind)
    }


def ask(url: str, name: str, **options: Any) -> httpx2.Response:
    body = {"model": name, "messages": MESSAGES} | options
    return httpx2.post(f"{url}/{name}/v1/chat/completions", json=body, timeout=120)


def seconds_until(true: Callable[[], bool], most: float) -> float:
    begin = time.monotonic()
    while not true():
        assert time.monotonic() < begin + most, serve.status()
        time.sleep(0.1)
    return time.monotonic() - begin


def states(name: str) -> Counter[str]:
    """Return how many replicas are in which state."""
    (deployment,) = serve.status().applications[name].deployments.values()
    return Counter({str(state): count for state, count in deployment.replica_states.items()})
