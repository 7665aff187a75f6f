"""A recorder of steps that replays them without CUDA."""

import pytest
from torch import Tensor

from diffray.workers.graphs import Bucket, Recorded


def replays(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """Note which buckets are replayed from now on."""
    seen: list[Bucket] = []
    forward = Recorded.forward

    def noted(recorded: Recorded) -> Tensor:
        seen.append(recorded.bucket)
        return forward(recorded)

    monkeypatch.setattr(Recorded, "forward", noted)
    return seen
