"""Receives new weights from a trainer's process, on all ranks of an engine or on none.

They are stored as a folder, which the engine then loads like any other. So ranks and replicas that
start later can load it too, and no weights change before all of them have arrived.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from diffray.components.backend import send
from diffray.components.checkpoints.arriving import Announced, ArrivingCheckpoint, dtype_of
from diffray.components.checkpoints.update import HasParts
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Config
from diffray.components.trainer_group import TrainerGroup
from diffray.workers.trainer_orders import (
    JoinTrainer,
    Received,
    ReceiveWeights,
    TrainerOrder,
)

_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Joined:
    group: TrainerGroup
    arriving: ArrivingCheckpoint


class Receiver:
    """The receiver of one rank; all ranks get the same orders.

    `root` is the folder for what arrives; `used` returns the weights that the engine may reload.
    """

    def __init__(
        self,
        plan: HasParts,
        config: Config,
        mesh: Mesh,
        root: str | None,
        used: Callable[[], str],
    ) -> None:
        self._plan, self._config, self._mesh = plan, config, mesh
        self._root = None if root is None else Path(root).expanduser().absolute()
        self._used = used
        self._joined: dict[str, _Joined] = {}

    def carry_out(self, order: TrainerOrder) -> Received:
        """Carry out an order, or refuse it and leave the weights unchanged."""
        try:
            if order.join is not None:
                return self._join(order.group, order.join)
            joined = self._find(order.group)
            if order.receive is not None:
                return self._receive(order.group, joined, order.receive)
            return self._leave(order.group)
        except ValueError as error:
            return Received(str(error))

    def _join(self, name: str, order: JoinTrainer) -> Received:
        if self._root is None:
            raise ValueError(
                "set received_weights, a folder for a trainer's weights that all ranks and "
                "replicas can read"
            )
        if name in self._joined:
            raise ValueError(
                f"the group {name!r} already exists; end it first (destroy_weights_update_group)"
            )
        if not 1 <= order.rank <= order.size - self._mesh.size:
            raise ValueError(
                f"{self._mesh.size} ranks from {order.rank} on do not fit a group of {order.size} "
                "with the trainer as rank 0"
            )
        device = self._mesh.device or _CPU
        if order.backend == "nccl" and device.type != "cuda":
            raise ValueError(f"nccl needs GPUs, but this engine runs on {device.type}; use gloo")
        group, reason = None, ""
        try:
            group = TrainerGroup.join(
                order.address,
                order.port,
                rank=order.rank + self._mesh.rank,
                size=order.size,
                name=name,
                backend=order.backend,
                device=device,
                timeout_s=order.timeout_s,
            )
        except (RuntimeError, OSError, ValueError) as error:
            reason = _first_line(error)
        if self._all("joined", group is not None) and group is not None:
            arriving = ArrivingCheckpoint(self._root, self._plan, self._config)
            self._joined[name] = _Joined(group, arriving)
            return Received()
        if group is not None:
            group.leave()
        raise ValueError(
            f"the group {name!r} at {order.address}:{order.port} did not form within "
            f"{order.timeout_s:g} s ({reason or 'another rank failed'})"
        )

    def _receive(self, name: str, joined: _Joined, order: ReceiveWeights) -> Received:
        coming = Announced.of(order.names, order.dtypes, order.shapes)
        joined.arriving.check(coming)  # with the same result on all ranks, before anything is sent
        reason = ""
        try:
            stored = coming.tensors.values()
            tensors = (joined.group.receive(each.shape, dtype_of(each)) for each in stored)
            on_host = (send(tensor, _CPU) for tensor in tensors)
            joined.arriving.arrive(coming, on_host, write=self._writes)
            missing = joined.arriving.missing
            if not missing and self._writes:
                joined.arriving.finish(order.number, {self._used()})
        except (RuntimeError, OSError) as error:
            reason = _first_line(error) or type(error).__name__
        if not self._all("received", not reason):
            self._leave(name)
            raise ValueError(
                "the weights did not arrive, so the old ones stay and the group "
                f"{name!r} has ended ({reason or 'another rank failed'})"
            )
        if missing:
            return Received(missing=missing)
        folder = joined.arriving.place(order.number)
        joined.arriving = joined.arriving.next()
        return Received(folder=str(folder))

    @property
    def _writes(self) -> bool:
        return self._mesh.rank == 0

    def _find(self, group: str) -> _Joined:
        if group not in self._joined:
            raise ValueError(
                f"this engine is in no group {group!r}, perhaps because its ranks were replaced; "
                "create it again (init_weights_update_group)"
            )
        return self._joined[group]

    def _leave(self, group: str) -> Received:
        joined = self._joined.pop(group)
        joined.group.leave()
        joined.arriving.forget()
        return Received()

    def _all(self, name: str, fine: bool) -> bool:
        return self._mesh.smallest(name, int(fine)) == 1


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
