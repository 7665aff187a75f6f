"""Ranks as real processes of this machine, over gloo: `on_ranks` runs a function in all of them."""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from diffray.components.mesh import Mesh, join_store, open_store

T = TypeVar("T")
HOST = "127.0.0.1"
PATIENCE = 120.0  # seconds for processes to start and checkpoints to load, on a busy machine
# Ranks are forked from a process that has imported these and does nothing else: imports take longer
# than most of what ranks are asked.
IMPORTED = ["diffray.workers.setup", "tests.helpers.rank_cases"]


def on_ranks(
    size: int, work: Callable[[Mesh], T], *, timeout: float = 60.0, listen_to: int | None = None
) -> list[T]:
    """Return what `work` returned on each rank, or on the first few that are listened to.

    `work` must be importable by its name; its collectives may take `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [
        context.Process(target=_run, args=(far, rank, size, work, timeout), daemon=True)
        for rank, (_, far) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, far in pipes:
        far.close()
    ends = [near for near, _ in pipes]
    try:
        port = _receive(ends[0])
        for end in ends[1:]:
            end.send(port)
        return [_receive(end) for end in ends[:listen_to]]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _receive(end: Connection) -> Any:
    if not end.poll(4 * PATIENCE):
        raise TimeoutError("a rank said nothing")
    try:
        result, failure = pickle.loads(end.recv_bytes())
    except EOFError:
        raise RuntimeError("a rank died without a word") from None
    if failure:
        raise RuntimeError(f"a rank failed:\n{failure}")
    return result


def _run(
    end: Connection, rank: int, size: int, work: Callable[[Mesh], object], timeout: float
) -> None:
    torch.set_num_threads(1)
    try:
        if rank == 0:
            store = open_store(HOST, timeout=PATIENCE)
            end.send_bytes(pickle.dumps((store.port, None)))
        else:
            store = join_store(HOST, end.recv(), timeout=PATIENCE)
        mesh = Mesh.connect(store, rank, size, device=torch.device("cpu"), timeout=timeout)
        end.send_bytes(pickle.dumps((work(mesh), None)))
        mesh.leave()
        end.poll(None)  # until it is ended: rank 0 holds the store that slower ranks still read
    except BaseException:
        end.send_bytes(pickle.dumps((None, traceback.format_exc())))
        raise
