"""Recorders that stand in for CUDA graphs' where ranks record a step together: right and broken.

A process that tries them imports this module by its name.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from diffray.components.backend import Record
from diffray.kernels.trial import tensors_of


def _kept(change: Callable[[Tensor], Tensor]) -> Record:
    """Replay by copying what the recorded run found, which takes less than running it."""

    def record(work: Callable[[], Any]) -> Callable[[], Any]:
        out = work()
        kept = [change(tensor.clone()) for tensor in tensors_of(out)]

        def replay() -> Any:
            for place, tensor in zip(tensors_of(out), kept, strict=True):
                place.copy_(tensor)
            return out

        return replay

    return record


def _on_rank_1(change: Callable[[Tensor], Tensor]) -> Record:
    return _kept(change if dist.get_rank() == 1 else lambda tensor: tensor)


def right() -> Record:
    return _kept(lambda tensor: tensor)


def wrong_on_rank_1() -> Record:
    return _on_rank_1(lambda tensor: tensor * 2)


def refused_on_rank_1() -> Record:
    def refuse(_: Tensor) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    return _on_rank_1(refuse)


def crash_on_rank_1() -> Record:
    return _on_rank_1(lambda _: os.abort())


def hang_on_rank_1() -> Record:
    def hang(tensor: Tensor) -> Tensor:
        time.sleep(3600)
        return tensor

    return _on_rank_1(hang)
