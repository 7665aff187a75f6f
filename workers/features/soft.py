"""Soft diffusion: masks show what the model expects there (`BatchPlan` reads and stores it)."""

from typing import TYPE_CHECKING, Self

from diffray.workers.features.feature import Feature

if TYPE_CHECKING:
    from diffray.workers.batch_state import BatchState


class Soft(Feature):
    """Rows with soft inputs; they need logits, so no kernel ends their steps."""

    @classmethod
    def of(cls, rows: "BatchState") -> Self | None:
        return cls() if any(s.policy.iteration.soft for s in rows.sequences) else None
