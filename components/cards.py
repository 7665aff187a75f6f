"""The GPUs that `diffray plan` knows by name. Without torch."""

from typing import Final, NamedTuple

from diffray.components.roofline import Ceilings
from diffray.components.spelling import did_you_mean

TAKEN: Final = 1 << 30  # bytes that CUDA, NCCL and libraries' work spaces take; an estimate


class Card(NamedTuple):
    """A device to plan for: the GPU of a rank, or the CPU of all."""

    name: str
    memory: int  # bytes
    taken: int = 0  # of it by others than the engine
    speed: Ceilings | None = None  # as published; None: unknown
    capability: tuple[int, int] | None = None  # for computing; None: unknown
    driver: str = ""  # what NVIDIA's driver calls it
    device: str = "cuda"


def _known(
    name: str, driver: str, mebibytes: int, bandwidth: float, rate: float, major: int, minor: int
) -> Card:
    """Return a GPU of so many TB/s, and Tflop/s of dense bfloat16 products."""
    speed = Ceilings(bandwidth * 1e12, rate * 1e12)
    return Card(name, mebibytes << 20, TAKEN, speed, (major, minor), driver)


# The memory that nvidia-smi reports; else NVIDIA's data sheets, of the SXM form if there are more.
_CARDS: Final = (
    _known("B200", "NVIDIA B200", 183359, 8.0, 2250, 10, 0),
    _known("H200", "NVIDIA H200", 143771, 4.8, 989, 9, 0),
    _known("H100", "NVIDIA H100 80GB HBM3", 81559, 3.35, 989, 9, 0),
    _known("A100-80GB", "NVIDIA A100-SXM4-80GB", 81920, 2.039, 312, 8, 0),
    _known("L40S", "NVIDIA L40S", 46068, 0.864, 362, 8, 9),
    _known("RTX-4090", "NVIDIA GeForce RTX 4090", 24564, 1.008, 165, 8, 9),
    _known("L4", "NVIDIA L4", 23034, 0.3, 121, 8, 9),
)
CARDS: Final = {card.name: card for card in _CARDS}


def named_card(name: str) -> Card:
    """Return a GPU by its name or its driver's, whatever the case and the signs between words."""
    for card in _CARDS:
        if _plain(name) in (_plain(card.name), _plain(card.driver)):
            return card
    longer = [each for each in CARDS if _plain(each).startswith(_plain(name))]
    near = did_you_mean((longer or [name.upper()])[0], CARDS)
    raise ValueError(
        f"there is no GPU {name!r} in the table{near or '.'} Known: {', '.join(CARDS)}; of others "
        "give the memory, as in --gpu-memory 80GiB"
    )


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()
