"""How many positions each step of a sampler decides that plans them before a block."""

from functools import lru_cache

import torch


@lru_cache(maxsize=256)
def dream_shares(steps: int, eps: float, masks: int, first_alone: bool) -> tuple[int, ...]:
    """Return the number of masks that each step decides; steps that decide none are left out.

    Time goes from 1 to `eps` in equal steps; going from t to s decides 1 - s/t of the masks.
    """
    times = torch.linspace(1, eps, steps + 1)  # float32 as in Dream, for the same rounding
    rates = 1 - times[1:] / times[:-1]
    found = [1] if first_alone else []
    for rate in rates[len(found) : -1]:
        found.append(int((masks - sum(found)) * rate))
    return tuple(share for share in (*found, masks - sum(found)) if share)


@lru_cache(maxsize=256)
def half_even_shares(steps: int, masks: int) -> tuple[int, ...]:
    """Return the same for A2D's sampler, whose time ends at 0 and whose shares are rounded.

    With more than twice as many steps as masks, each step that decides any decides one.
    """
    steps = min(steps, 2 * masks + 1)
    # float32 as in A2D, for the same rounding.
    times = 1 - (1 - (torch.arange(steps + 1, dtype=torch.float64) / steps).float())
    rates = 1 - (times[:-1] / times[1:]).double()
    found: list[int] = []
    for rate in reversed(rates.tolist()):
        found.append(round((masks - sum(found)) * rate))
    return tuple(share for share in found if share)
