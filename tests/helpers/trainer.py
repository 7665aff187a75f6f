"""A trainer's process: it opens a group as SGLang's users do, and broadcasts a file's tensors."""

import multiprocessing
import os
import signal
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from tools.serve_process import free_port

NAME = "weight_update_group"
READY_S = 120.0


def listing(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the description of tensors that an engine gets before it receives them."""
    return {
        "names": [*tensors],
        "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()],
    }


class Trainer:
    """It sends all tensors again and again; with `last` only so many, and dies; with 0 it hangs."""

    def __init__(self, file: Path, world_size: int, last: int | None = None) -> None:
        self.port, self.tensors = free_port(), load_file(file)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is loaded once
        given = file, self.port, world_size, last
        self._process = context.Process(target=_send, args=given, daemon=True)
        self._process.start()
        end = time.monotonic() + READY_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert time.monotonic() < end and self._process.is_alive()
            time.sleep(0.02)

    @property
    def group(self) -> dict[str, Any]:
        return {"master_address": "127.0.0.1", "master_port": self.port, "backend": "gloo"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()


def _send(file: Path, port: int, size: int, last: int | None) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=READY_S)
    store, *_ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=timeout))
    own: Any = distributed_c10d.PrefixStore(NAME, store)
    name: Any = NAME
    group, _ = distributed_c10d._new_process_group_helper(
        size, 0, [], "gloo", own, group_name=name, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    tensors = [*load_file(file).values()]
    while True:
        for tensor in tensors[:last]:
            dist.broadcast(tensor, src=0, group=group)
        if last == 0:
            signal.pause()
        if last:
            os._exit(1)
