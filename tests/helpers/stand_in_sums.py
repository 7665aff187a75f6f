"""Sums over ranks that stand in for those in symmetric memory: right, wrong, broken, slow.

A process that tries sums imports this module by its name. In it the group's own sums take long, as
over gloo no other would be faster.
"""

import os
import time

import torch
from torch import Tensor

from diffray.components.mesh import Mesh, Sum

LONG_S = 0.005  # many times what gloo takes for small tensors
MOST = 1 << 15  # bytes


def right(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    """Add up in the order of the ranks, into another tensor, as torch's one-shot sum does."""
    plain = Mesh.all_reduce

    def slow(self: Mesh, x: Tensor) -> Tensor:
        time.sleep(LONG_S)
        return plain(self, x)

    if Mesh.all_reduce.__name__ != "slow":
        Mesh.all_reduce = slow  # type: ignore[method-assign]  # in this process alone

    def add_up(x: Tensor) -> Tensor:
        assert x.dtype == dtype and x.nbytes <= most_bytes
        return sum_of(mesh, x)

    return add_up


def sum_of(mesh: Mesh, x: Tensor) -> Tensor:
    total, *others = mesh.all_gather(x).unbind()
    for other in others:
        total = total + other
    return total


def wrong_on_rank_1(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    inner = right(mesh, dtype, most_bytes)
    return lambda x: inner(x).index_fill_(0, torch.tensor([0]), 1.0) if mesh.rank else inner(x)


def unequal(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    """Round on rank 1 otherwise than on rank 0, by less than an error."""
    inner = right(mesh, dtype, most_bytes)
    return lambda x: inner(x) * (1 + 1e-6 * mesh.rank)


def crash_on_rank_1(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    inner = right(mesh, dtype, most_bytes)
    return lambda x: os.abort() if mesh.rank else inner(x)


def hang_on_rank_1(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    inner = right(mesh, dtype, most_bytes)

    def add_up(x: Tensor) -> Tensor:
        time.sleep(3600 * mesh.rank)
        return inner(x)

    return add_up


def absent_on_rank_1(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    if mesh.rank:
        raise RuntimeError("no symmetric memory between these devices")
    return right(mesh, dtype, most_bytes)


def slow_on_rank_1(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    inner = right(mesh, dtype, most_bytes)

    def add_up(x: Tensor) -> Tensor:
        out = inner(x)
        time.sleep(3 * LONG_S * mesh.rank)
        return out

    return add_up


def right_if_small(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    inner = right(mesh, dtype, most_bytes)
    return lambda x: inner(x) * (2 if x.nbytes > MOST else 1)
