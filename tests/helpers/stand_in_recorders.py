"""Recorders that stand in for CUDA graphs' where ranks record a step together: right and broken.

A process that tries them imports this module by its name, for its kernel too. How long steps take
is what the stand-ins' clock says: a launch of that kernel takes longer than a replay of all.
"""

import os
import time
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from diffray.components.backend import Record
from diffray.kernels import norm
from diffray.kernels.trial import tensors_of
from tests.helpers import stand_in_clock as clock
from tests.helpers.stand_in_kernels import kernel_of

_LAUNCH_S = 0.005


def launched(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    clock.pass_time(_LAUNCH_S)
    return norm.rms_norm(x, weight, eps)


KERNELS: Final = (kernel_of("rms_norm", norm.rms_norm, launched),)


def _again(change: Callable[[Tensor], Tensor], replay_s: float = 0.001) -> Record:
    """Replay by computing again with what the inputs hold then, sums over the ranks among it."""
    clock.use()

    def record(work: Callable[[], Any]) -> Callable[[], Any]:
        out = work()
        places = tensors_of(out)
        for place in places:
            change(place)

        def replay() -> Any:
            begin = clock.now()
            for place, fresh in zip(places, tensors_of(work()), strict=True):
                place.copy_(change(fresh))
            clock.turn_back(begin)
            clock.pass_time(replay_s)
            return out

        return replay

    return record


def _on_rank_1(change: Callable[[Tensor], Tensor]) -> Record:
    return _again(change if dist.get_rank() == 1 else lambda tensor: tensor)


def right() -> Record:
    return _again(lambda tensor: tensor)


def wrong_on_rank_1() -> Record:
    return _on_rank_1(lambda tensor: tensor * 2)


def slow_on_rank_1() -> Record:
    return _again(lambda tensor: tensor, replay_s=_LAUNCH_S if dist.get_rank() == 1 else 0.0)


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
