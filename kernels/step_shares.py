"""How many positions each step of Dream's sampler decides."""

from functools import lru_cache

import torch


@lru_cache(maxsize=256)
def shares(steps: int, eps: float, masks: int, first_alone: bool) -> tuple[int, ...]:
    """Return the number of masks that each step decides; steps that decide none are left out.

    Time goes from 1 to `eps` in equal steps; going from t to s decides 1 - s/t of the masks.
    """
    times = torch.linspace(1, eps, steps + 1)  # float32 as in Dream, for the same rounding
    rates = 1 - times[1:] / times[:-1]
    found = [1] if first_alone else []
    for rate in rates[len(found) : -1]:
        found.append(int((masks - sum(found)) * rate))
    return tuple(share for share in (*found, masks - sum(found)) if share)
