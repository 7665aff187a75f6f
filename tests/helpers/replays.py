"""A recorder of steps that replays them without CUDA, and what is replayed."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from diffray.kernels.verify import tensors_of
from diffray.workers.graphs import Bucket, Recorded


def again(work: Callable[[], Any]) -> Callable[[], Any]:
    """Stand for a recording: compute again, into the same tensors."""
    return into_the_same(work(), work)


def into_the_same(out: Any, work: Callable[[], Any]) -> Callable[[], Any]:
    def replay() -> Any:
        for old, new in zip(tensors_of(out), tensors_of(work()), strict=True):
            old.copy_(new)
        return out

    return replay


def frozen(work: Callable[[], Any]) -> Callable[[], Any]:
    """Stand for a recording whose replays do nothing."""
    out = work()
    return lambda: out


def replays(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    seen: list[Bucket] = []
    forward = Recorded.forward

    def noted(recorded: Recorded) -> Tensor:
        seen.append(recorded.bucket)
        return forward(recorded)

    monkeypatch.setattr(Recorded, "forward", noted)
    return seen
