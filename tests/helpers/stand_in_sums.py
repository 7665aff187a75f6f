"""Sums over ranks that stand in for those in symmetric memory: right, wrong, broken, slow.

A process that tries sums imports this module by its name. How long sums take in it, the group's
too, is what the stand-ins' clock says: over gloo none would be faster than the group's.
"""

import os
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from diffray.components.mesh import Mesh, Sum
from tests.helpers import stand_in_clock as clock

GROUP_S, ONE_SHOT_S, SLOW_S = 0.005, 0.001, 0.015  # what a sum takes
MOST = 1 << 15  # bytes


def right(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    """Add up in the order of the ranks, into another tensor, as torch's one-shot sum does."""
    plain = Mesh.all_reduce

    def timed(self: Mesh, x: Tensor) -> Tensor:
        clock.pass_time(GROUP_S)
        clock.meet(self)
        return plain(self, x)

    Mesh.all_reduce = timed  # type: ignore[method-assign]  # in this process alone
    clock.use()

    def add_up(x: Tensor) -> Tensor:
        assert x.dtype == dtype and x.nbytes <= most_bytes
        clock.pass_time(ONE_SHOT_S)
        clock.meet(mesh)
        return sum_of(mesh, x)

    return add_up


def sum_of(mesh: Mesh, x: Tensor) -> Tensor:
    total, *others = mesh.all_gather(x).unbind()
    for other in others:
        total = total + other
    return total


def _on_rank_1(broken: Callable[[Sum, Tensor], Tensor]) -> Callable[[Mesh, torch.dtype, int], Sum]:
    """Return what opens sums that are right on rank 0 alone."""

    def opened(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
        inner = right(mesh, dtype, most_bytes)
        return partial(broken, inner) if mesh.rank else inner

    return opened


def _hang(inner: Sum, x: Tensor) -> Tensor:
    time.sleep(3600)
    return inner(x)


def _slow(inner: Sum, x: Tensor) -> Tensor:
    clock.pass_time(SLOW_S)
    return inner(x)


unequal = _on_rank_1(lambda inner, x: inner(x) * (1 + 1e-6))  # rounded otherwise, by a little
crash_on_rank_1 = _on_rank_1(lambda *_: os.abort())
hang_on_rank_1 = _on_rank_1(_hang)
slow_on_rank_1 = _on_rank_1(_slow)


def absent_on_rank_1(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    if mesh.rank:
        raise RuntimeError("no symmetric memory between these devices")
    return partial(sum_of, mesh)


def right_if_small(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    inner = right(mesh, dtype, most_bytes)
    return lambda x: inner(x) * (2 if x.nbytes > MOST else 1)
