"""The methods of DiffusionLLM that change its engine: new weights, sleep."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Literal, Protocol

from diffray.cluster.control.engine_client import WaitingClient
from diffray.cluster.control.weight_changes import InFlight, Sleep, UpdateWeights, check_level
from diffray.components.checkpoints.update import Source
from diffray.workers.messages import AWAKE
from diffray.workers.trainer_orders import (
    GROUP,
    TIMEOUT_S,
    JoinTrainer,
    ReceiveWeights,
    TrainerOrder,
)

if TYPE_CHECKING:
    import torch


class HasClient(Protocol):
    """An object with an engine."""

    @property
    def client(self) -> WaitingClient: ...


class EngineChanges:
    """The methods that change an engine, for a class with a `client`."""

    def update_weights(
        self: HasClient,
        source: Source,
        *,
        in_flight: InFlight = "finish",
        version: str | None = None,
    ) -> str:
        """Replace the weights in place; return their version, which answers carry.

        `source` is a folder or Hub id of the same model or, in one process, all or some tensors by
        their names in the checkpoint. Answers that have started finish on the old weights; with
        "restart", only those that have reported tokens or canvases. A refusal changes nothing.
        """
        return self.client.apply(UpdateWeights(source, in_flight, version))

    def init_weights_update_group(
        self: HasClient,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = GROUP,
        backend: Literal["nccl", "gloo"] = "nccl",
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Join a trainer's torch.distributed group, which the trainer opens as its rank 0.

        The engine's ranks start at `rank_offset`. The engine waits for the other ranks, and later
        for each tensor, for at most `timeout_s` seconds. Needs the option `received_weights`.
        """
        address = master_address, master_port
        join = JoinTrainer(*address, rank_offset, world_size, backend, timeout_s)
        self.client.ask_trainer(TrainerOrder(group_name, join))

    def update_weights_from_distributed(
        self: HasClient,
        names: Items[str],
        dtypes: "Items[str | torch.dtype]",
        shapes: Iterable[Items[int]],
        group_name: str = GROUP,
        *,
        in_flight: InFlight = "finish",
        version: str | None = None,
    ) -> str | None:
        """Receive tensors that the trainer broadcasts during the call, in this order.

        The tensors may be spread over several calls. The call that receives the model's last tensor
        replaces the weights, as `update_weights` does, and returns their version; others, None.
        """
        receive = ReceiveWeights.listed(names, dtypes, shapes)
        folder = self.client.ask_trainer(TrainerOrder(group_name, receive=receive)).folder
        return self.client.apply(UpdateWeights(folder, in_flight, version)) if folder else None

    def destroy_weights_update_group(self: HasClient, group_name: str = GROUP) -> None:
        """Leave a trainer's group."""
        self.client.ask_trainer(TrainerOrder(group_name))

    def sleep(self: HasClient, level: int = 1) -> None:
        """Free the K/V memory, at level 2 that of the weights too, until `wake_up`.

        Answers that have started finish first. At level 1 a GPU's weights move to host memory. A
        sleeping model refuses to answer.
        """
        check_level(level)
        self.client.apply(Sleep(level))

    def wake_up(self: HasClient) -> None:
        """Allocate the memory again; after level 2 also read the weights from their source."""
        self.client.apply(Sleep(AWAKE))

    @property
    def is_sleeping(self: HasClient) -> bool:
        return self.client.level > AWAKE
