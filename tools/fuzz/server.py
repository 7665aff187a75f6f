"""The endpoint over an engine, in a process of its own, without Ray: what a run tries."""

import multiprocessing
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(frozen=True, slots=True)
class Running:
    """A server that listens, and its process."""

    url: str
    pid: int

    def peak_memory(self) -> int:
        """Return the bytes that its process has held at most."""
        with open(f"/proc/{self.pid}/status") as status:
            (line,) = (line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024


@contextmanager
def serving(model: str, max_model_len: int | None = None) -> Iterator[Running]:
    """Serve a model until the block is left; raises if the server has died by then."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(theirs, model, max_model_len), daemon=True)
    child.start()
    theirs.close()
    try:
        port = ours.recv()
        assert child.pid is not None
        yield Running(f"http://127.0.0.1:{port}", child.pid)
        if child.exitcode is not None:
            raise RuntimeError(f"the server ended with {child.exitcode}")
    finally:
        child.terminate()
        child.join()


def _serve(pipe: Connection, model: str, max_model_len: int | None) -> None:
    import torch
    import uvicorn

    from diffray.cluster.api.http_app import build_api
    from diffray.cluster.api.service import Service
    from diffray.cluster.control.engine_config import EngineConfig
    from diffray.cluster.control.local import load_local

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    # Drafts are run whatever they cost.
    wanted = EngineConfig(max_model_len=max_model_len, draft_overhead=10_000)
    engine, tokenizer = load_local(model, wanted)
    service = Service(engine, tokenizer, (model,), scheduling_policy="priority")
    app = build_api(lambda: service)
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_keep_alive=600)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    pipe.send(listener.getsockname()[1])
    with engine:
        uvicorn.Server(config).run(sockets=[listener])
