"""The faults of a run: drawn from a seed, so that the same run can be had again."""

import random
from dataclasses import dataclass

# What happens, how often beside the others, and how long it lasts (0: until it is mended).
KINDS: dict[str, tuple[int, tuple[float, float]]] = {
    "kill rank": (5, (0, 0)),
    "kill coordinator": (3, (0, 0)),
    "kill replica": (2, (0, 0)),
    "kill proxy": (2, (0, 0)),
    "kill controller": (1, (0, 0)),
    "kill batches": (2, (0, 0)),
    "pause rank": (3, (0.5, 2.5)),
    "pause coordinator": (2, (0.5, 2.5)),
    "pause replica": (2, (0.5, 2.5)),
    "hang rank": (2, (0, 0)),
    "hang coordinator": (2, (0, 0)),
    "hang replica": (2, (0, 0)),
    "overload": (2, (0, 0)),
    "leave": (2, (0, 0)),
}
# Those that break connections, and for how many seconds one may still be given to what is lost.
CUTS = {"kill replica": 3.0, "hang replica": 30.0, "kill proxy": 15.0}
_TWICE = 0.15  # of the faults come while the one before is being mended


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    number: int
    kind: str
    wait: float  # seconds before it, after all is well again; or after the fault before
    at_once: bool  # it does not wait until all is well again
    pick: float  # whom it hits, of those that it may: from 0 to 1
    lasts: float


def schedule(count: int, seed: int) -> list[Fault]:
    """Return so many faults; each kind comes once before chance decides."""
    draw = random.Random(seed)
    names = list(KINDS)
    weights = [weight for weight, _ in KINDS.values()]
    kinds = draw.sample(names, k=len(names)) + draw.choices(names, weights, k=count)
    return [
        Fault(
            number,
            kind,
            wait=draw.uniform(0.5, 3.0),
            at_once=number > 0 and draw.random() < _TWICE,
            pick=draw.random(),
            lasts=draw.uniform(*KINDS[kind][1]),
        )
        for number, kind in enumerate(kinds[:count])
    ]
