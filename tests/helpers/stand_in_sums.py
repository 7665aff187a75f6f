"""Sums over ranks that stand in for those in symmetric memory: right, wrong, absent."""

from functools import partial

import torch
from torch import Tensor

from diffray.components.mesh import Mesh, Sum


def right(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    """Add up in the order of the ranks, into another tensor, as torch's one-shot sum does."""

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
    """Round otherwise, by a little: the ranks would have other numbers."""
    return lambda x: sum_of(mesh, x) * (1 + 1e-6 * mesh.rank)


def twice(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    return lambda x: sum_of(mesh, x) * 2


def fails_on_rank_1(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    """Open, but not take the dtype."""

    def add_up(x: Tensor) -> Tensor:
        total = sum_of(mesh, x)
        if mesh.rank:
            raise RuntimeError("not implemented for 'Half'")
        return total

    return add_up


def absent_on_rank_1(mesh: Mesh, dtype: torch.dtype, most_bytes: int) -> Sum:
    if mesh.rank:
        raise RuntimeError("no symmetric memory between these devices")
    return partial(sum_of, mesh)
