"""A real HTTP server around an engine in this process, for tests of the endpoint."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from diffray.cluster.api.http_app import build_api
from diffray.cluster.api.prompts import RemoteImages
from diffray.cluster.api.service import Service
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.llm import DiffusionLLM
from diffray.cluster.control.local import LocalEngine, load_local
from diffray.workers.adapters import LoadedAdapters

DTYPE = "float64"  # in which an answer does not depend on other running requests


@dataclass(frozen=True)
class Served:
    """A running server, and the same model to compare it with."""

    url: str
    name: str
    service: Service
    engine: LocalEngine
    llm: DiffusionLLM


def events(text: str) -> list[Any]:
    """Return the objects of a stream: its events have their types as names, or [DONE] ends it."""
    *parts, end = text.split("\n\n")
    assert end == ""
    found, names = [], [part.startswith("event: ") for part in parts]
    if not any(names):
        assert parts.pop() == "data: [DONE]"
    for part in parts:
        name, _, data = part.rpartition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == (f"event: {found[-1]['type']}" if any(names) else "")
    return found


@contextmanager
def serve(service: Service, settings: ApiSettings | None = None, prefix: str = "") -> Iterator[str]:
    """Run uvicorn in a thread on a port of its own; yields the base URL."""
    app: ASGIApp = build_api(lambda: service, settings)
    if prefix:
        app = Starlette(routes=[Mount(prefix, app)])
    # Longer than uvicorn's 5 seconds: a busy client would send on a connection that is closed.
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_keep_alive=600)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "uvicorn did not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{prefix}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


@contextmanager
def serve_model(
    model: str, name: str = "", settings: ApiSettings | None = None, **options: Any
) -> Iterator[Served]:
    """Serve a model, and load it a second time to compare with."""
    config = EngineConfig.model_validate({"dtype": DTYPE, "max_num_seqs": 8} | options)
    engine, tokenizer = load_local(model, config)
    names = name or model, f"{name or model}-alias"
    adapters = LoadedAdapters(model, reserved=names)
    remote_images = RemoteImages(settings)
    service = Service(engine, tokenizer, names, adapters=adapters, remote_images=remote_images)
    with (
        engine,
        closing(service),
        DiffusionLLM(model, dtype=DTYPE, max_num_seqs=8) as llm,
        serve(service, settings) as url,
    ):
        yield Served(url, name or model, service, engine, llm)
