"""The process group in which a trainer sends weights to the ranks of engines.

It is set up like those of SGLang's and OpenRLHF's trainers: a store at the trainer, with keys under
the group's name. The trainer is rank 0 and broadcasts.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not stubbed
from torch.distributed.rendezvous import rendezvous

Backend = Literal["nccl", "gloo"]

_TRAINER: Final = 0


class TrainerGroup:
    """One rank's end of the group. Any failure raises RuntimeError and breaks the group."""

    def __init__(self, group: Any, device: torch.device, timeout: timedelta) -> None:
        self._group, self._device, self._timeout = group, device, timeout

    @classmethod
    def join(
        cls,
        address: str,
        port: int,
        *,
        rank: int,
        size: int,
        name: str,
        backend: Backend,
        device: torch.device,
        timeout_s: float,
    ) -> Self:
        """Join the group; the timeout is for all ranks to join, and later for each tensor."""
        timeout = timedelta(seconds=timeout_s)
        host = f"[{address}]" if ":" in address else address
        store, *_ = next(rendezvous(f"tcp://{host}:{port}", rank, size, timeout=timeout))
        store.set_timeout(timeout)
        place = "cuda" if backend == "nccl" else "cpu"
        # Named like the keys of torch.distributed's own groups.
        own = PrefixStore(f"{place}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        if backend == "gloo":
            group: Any = dist.ProcessGroupGloo(own, rank, size, timeout)
            return cls(group, torch.device("cpu"), timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _blocking_wait():
            group = dist.ProcessGroupNCCL(own, rank, size, options)
        return cls(group, device, timeout)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that the trainer broadcasts next."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank = _TRAINER
        options.timeout = self._timeout
        self._group.broadcast([tensor], options).wait()
        return tensor

    def leave(self) -> None:
        """End the group, even if other ranks are gone."""
        self._group.abort()


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """Make an NCCL group created in this context raise on a timeout, not end the process."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
