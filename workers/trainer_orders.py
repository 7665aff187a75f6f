"""Orders about a trainer in another process: join its group, receive weights, or leave."""

import time
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Literal, Self

GROUP = "weight_update_group"  # SGLang's default name
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class JoinTrainer:
    """Join a trainer's group of `size`, in which the engine's first rank is `rank`."""

    address: str
    port: int
    rank: int
    size: int
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class ReceiveWeights:
    """Receive tensors by the names of the checkpoint, in the order in which they are sent.

    `number` names the folder for the weights once all of the model's have arrived.
    """

    names: list[str]
    dtypes: list[str]  # as torch calls them
    shapes: list[list[int]]
    number: int

    @classmethod
    def listed(
        cls, names: Iterable[str], dtypes: Iterable[Any], shapes: Iterable[Items[int]]
    ) -> Self:
        named = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return cls(list(names), named, [list(each) for each in shapes], time.time_ns())


@dataclass(frozen=True, slots=True)
class TrainerOrder:
    """What to do about a trainer's group.

    With neither `join` nor `receive`: leave the group, and discard new weights that have arrived.
    """

    group: str
    join: JoinTrainer | None = None
    receive: ReceiveWeights | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """The outcome of an order: why it was refused, or where the weights are once all are there."""

    refusal: str = ""
    folder: str = ""
    missing: int = 0  # of the model's tensors


def lost(group: str) -> str:
    """Return why an order fails after ranks were lost."""
    return (
        f"ranks were lost, and the group {group!r} with them; the old weights stay. Create the "
        "group again (init_weights_update_group)"
    )


def granted(received: Received) -> Received:
    """Return the outcome; raise ValueError with the reason if it is a refusal."""
    if received.refusal:
        raise ValueError(received.refusal)
    return received
