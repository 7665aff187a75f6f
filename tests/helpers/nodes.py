"""Serve applications over several nodes of one machine."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2
from ray import serve
from ray._private.state import actors

from diffray.cluster.serve.config_file import Applications, applications
from diffray.cluster.serve.server import deploy, wait_until_ready
from tools.serve_process import free_port

T = TypeVar("T")
MESSAGES: Any = [{"role": "user", "content": "What is 12 plus 30?"}]


def application(name: str, **options: Any) -> Applications:
    engine = {"device": "cpu", "cpu_threads": 1} | options.pop("engine_kwargs", {})
    loading = {"model_id": name, "model_source": "demo"}
    given = {"model_loading_config": loading, "engine_kwargs": engine, "route_prefix": f"/{name}"}
    return applications(given | options, name)


@contextmanager
def serving() -> Iterator[str]:
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


def start(wanted: Applications) -> None:
    stopped = threading.Event()
    deploy(wanted, stopped)
    wait_until_ready(wanted, print, stopped)


def alive(kind: str) -> dict[int, str]:
    return {
        actor["Pid"]: actor["Address"]["NodeID"]
        for actor in actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"].startswith(kind)
    }


def ask(url: str, name: str, **options: Any) -> httpx2.Response:
    body = {"model": name, "messages": MESSAGES} | options
    return httpx2.post(f"{url}/{name}/v1/chat/completions", json=body, timeout=120)


@contextmanager
def clients(count: int, ask_once: Callable[[], T]) -> Iterator[list[T]]:
    """Ask all the time in so many threads; yields the answers, which grow."""
    ended, found = threading.Event(), list[T]()

    def ask_on() -> None:
        while not ended.is_set():
            found.append(ask_once())

    with ThreadPoolExecutor(count) as pool:
        asking = [pool.submit(ask_on) for _ in range(count)]
        try:
            yield found
        finally:
            ended.set()
        for each in asking:
            each.result()


def wait_until(true: Callable[[], bool], most: float) -> None:
    begin = time.monotonic()
    while not true():
        assert time.monotonic() < begin + most, serve.status()
        time.sleep(0.1)


def states(name: str) -> Counter[str]:
    (deployment,) = serve.status().applications[name].deployments.values()
    return Counter({str(state): count for state, count in deployment.replica_states.items()})
