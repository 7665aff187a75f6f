"""What operators may do to a running engine: the paths, their bodies, and what carries them out."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from pydantic import Field

from diffray.cluster.api.bodies import ModelBody
from diffray.cluster.api.errors import Json
from diffray.cluster.api.served import Endpoint
from diffray.cluster.control.engine_client import EngineClient, Load
from diffray.cluster.control.weight_changes import EngineChange, InFlight, Sleep, UpdateWeights
from diffray.workers.messages import AWAKE
from diffray.workers.trainer_orders import (
    GROUP,
    TIMEOUT_S,
    JoinTrainer,
    Received,
    ReceiveWeights,
    TrainerOrder,
)

if TYPE_CHECKING:
    from diffray.workers.adapters import LoadedAdapters  # imports torch

UPDATE_WEIGHTS: Final = "/update_weights_from_disk"  # SGLang's names
JOIN_TRAINER, LEAVE_TRAINER = "/init_weights_update_group", "/destroy_weights_update_group"
RECEIVE_WEIGHTS: Final = "/update_weights_from_distributed"
SLEEP, WAKE_UP, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"  # vLLM's
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class SleepBody(ModelBody):
    """Give memory back on all replicas: that of the K/V, at level 2 that of the weights too.

    At level 1 the weights of a GPU move to the host's memory. Running requests end first; requests
    that arrive meanwhile wait.
    """

    level: Literal[1, 2] = Field(
        1, description="1: give the K/V memory back; 2: that of the weights, too."
    )


class WakeUpQuery(ModelBody):
    """Take the memory again on all replicas, and go on with the requests that wait."""


class IsSleepingQuery(ModelBody):
    """Say whether the model sleeps."""


class UpdateWeightsBody(ModelBody):
    """Replace the weights of all replicas with those of a folder with the same model.

    Requests go on, and no answer mixes versions. Weights that do not fit are refused, and nothing
    changes.
    """

    model_path: str = Field(
        min_length=1,
        description="A folder with the new weights that every replica can read, or a Hub id.",
    )
    weight_version: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="The name of the new weights; without names versions count up from 0.",
    )
    in_flight: InFlight = Field(
        "finish",
        description="finish: answers that have started end on the old weights; restart: those of "
        "which nothing has been reported, no token and no canvas, start over on the new ones.",
    )


class LeaveTrainerBody(ModelBody):
    """Leave a trainer's group; weights that have arrived only in part are dropped."""

    group_name: str = Field(GROUP, min_length=1, max_length=200, description="The group's name.")


class JoinTrainerBody(LeaveTrainerBody):
    """Join a trainer's torch.distributed group, of which the trainer is rank 0.

    The ranks of all replicas join; the server needs the option `received_weights`.
    """

    master_address: str = Field(
        min_length=1, max_length=255, description="Where the trainer, rank 0, opens the group."
    )
    master_port: int = Field(ge=1, le=65535, description="The port of that address.")
    rank_offset: int = Field(
        ge=1, description="This model's first rank in the group; the ranks of all replicas follow."
    )
    world_size: int = Field(ge=2, description="How many ranks the group has, with the trainer.")
    backend: Literal["nccl", "gloo"] = Field("nccl", description="nccl for GPUs, gloo for CPUs.")
    timeout_s: float = Field(
        TIMEOUT_S,
        gt=0,
        le=86400,
        description="How long to wait for the other ranks, and later for each tensor.",
    )


class ReceiveWeightsBody(LeaveTrainerBody):
    """Replace the weights with those that a trainer broadcasts meanwhile.

    The old weights stay until all tensors have arrived; if they do not arrive, the group ends.
    """

    names: list[str] = Field(
        min_length=1,
        description="The tensors that the trainer broadcasts, in this order, by their names in the "
        "checkpoint. The weights change once all tensors have arrived, in one call or several.",
    )
    dtypes: list[str] = Field(description="Their dtypes, such as bfloat16.")
    shapes: list[list[int]] = Field(description="Their shapes.")
    weight_version: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="The name of the new weights, in the last call.",
    )
    in_flight: InFlight = Field(
        "finish", description="As in /update_weights_from_disk, in the last call."
    )
    flush_cache: Literal[True] = Field(True, description="Stored prefixes are always dropped.")


class UnloadAdapterBody(ModelBody):
    """Unload a LoRA adapter; answers that have started with it continue."""

    lora_name: str = Field(min_length=1, max_length=200, description="The adapter's name.")


class LoadAdapterBody(UnloadAdapterBody):
    """Load a LoRA adapter on all replicas; from then on requests name it as their model."""

    lora_path: str = Field(
        min_length=1,
        description="A PEFT folder with the adapter that every replica can read, or a Hub id.",
    )


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load a LoRA adapter under a name."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Unload the LoRA adapter of this name."""

    name: str


AnyChange = EngineChange | LoadAdapter | UnloadAdapter


class Operated(Protocol):
    """What carries out an operator's requests: an engine, or all replicas of a deployment."""

    async def apply(self, change: AnyChange) -> str:
        """Make a change; return the weights' version. Raises ValueError with nothing changed."""
        ...

    async def ask_trainer(self, order: TrainerOrder) -> Received:
        """Join a trainer's group, or receive weights into a folder; raises ValueError if it fails.

        No weights change: UpdateWeights takes the folder.
        """
        ...

    async def load(self) -> Load: ...


@dataclass(frozen=True, slots=True)
class OneEngine:
    """An engine without replicas, and the adapters that its requests may name."""

    engine: EngineClient
    adapters: "LoadedAdapters"

    async def apply(self, change: AnyChange) -> str:
        match change:
            case LoadAdapter(name, path):
                await asyncio.to_thread(self.adapters.load, name, path)
            case UnloadAdapter(name):
                self.adapters.unload(name)
            case _:
                return await self.engine.apply(change)
        return (await self.load()).weights_version

    async def ask_trainer(self, order: TrainerOrder) -> Received:
        return await self.engine.ask_trainer(order)

    async def load(self) -> Load:
        return await self.engine.load()


async def _update_weights(operated: Operated, body: UpdateWeightsBody) -> Json:
    change = UpdateWeights(body.model_path, body.in_flight, body.weight_version)
    version = await operated.apply(change)
    return _done(f"The weights are those of {body.model_path}.") | {"weight_version": version}


async def _join_trainer(operated: Operated, body: JoinTrainerBody) -> Json:
    address = body.master_address, body.master_port
    join = JoinTrainer(*address, body.rank_offset, body.world_size, body.backend, body.timeout_s)
    await operated.ask_trainer(TrainerOrder(body.group_name, join))
    return _done(f"The ranks are in the group {body.group_name}.")


async def _leave_trainer(operated: Operated, body: LeaveTrainerBody) -> Json:
    await operated.ask_trainer(TrainerOrder(body.group_name))
    return _done(f"The ranks have left the group {body.group_name}.")


async def _receive_weights(operated: Operated, body: ReceiveWeightsBody) -> Json:
    receive = ReceiveWeights.listed(body.names, body.dtypes, body.shapes)
    received = await operated.ask_trainer(TrainerOrder(body.group_name, receive=receive))
    if not received.folder:
        version = (await operated.load()).weights_version
        said = f"{received.missing} of the model's tensors are missing; the old weights stay."
    else:
        change = UpdateWeights(received.folder, body.in_flight, body.weight_version)
        version = await operated.apply(change)
        said = "The weights are those that the trainer sent."
    return _done(said) | {"weight_version": version}


async def _load_adapter(operated: Operated, body: LoadAdapterBody) -> Json:
    await operated.apply(LoadAdapter(body.lora_name, body.lora_path))
    return _done(f"The adapter {body.lora_name} is loaded.")


async def _unload_adapter(operated: Operated, body: UnloadAdapterBody) -> Json:
    await operated.apply(UnloadAdapter(body.lora_name))
    return _done(f"The adapter {body.lora_name} is unloaded.")


async def _sleep(operated: Operated, query: SleepBody) -> Json:
    await operated.apply(Sleep(query.level))
    return {}


async def _wake_up(operated: Operated, _: WakeUpQuery) -> Json:
    await operated.apply(Sleep(AWAKE))
    return {}


async def _is_sleeping(operated: Operated, _: IsSleepingQuery) -> Json:
    return {"is_sleeping": (await operated.load()).sleep_level > AWAKE}


def _done(message: str) -> Json:
    return {"success": True, "message": message}


# By their paths, which need an operator's key.
OPERATIONS: Final = {
    UPDATE_WEIGHTS: Endpoint(UpdateWeightsBody, _update_weights),
    JOIN_TRAINER: Endpoint(JoinTrainerBody, _join_trainer),
    RECEIVE_WEIGHTS: Endpoint(ReceiveWeightsBody, _receive_weights),
    LEAVE_TRAINER: Endpoint(LeaveTrainerBody, _leave_trainer),
    LOAD_ADAPTER: Endpoint(LoadAdapterBody, _load_adapter),
    UNLOAD_ADAPTER: Endpoint(UnloadAdapterBody, _unload_adapter),
    SLEEP: Endpoint(SleepBody, _sleep, queried=True),
    WAKE_UP: Endpoint(WakeUpQuery, _wake_up, queried=True),
    IS_SLEEPING: Endpoint(IsSleepingQuery, _is_sleeping, "GET", queried=True),
}
OPERATED: Final = tuple(OPERATIONS)
