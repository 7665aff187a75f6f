"""Sequences side by side, their pages in no order, as an engine has them amid its work."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.measure import PAGE_SIZE
from diffray.kernels.windows import PagedWindows


class Batch(NamedTuple):
    """Windows of equal length at the end of equal contexts, and where their tokens are."""

    windows: PagedWindows
    positions_T: Tensor
    slots_T: Tensor
    context: int  # of each sequence
    num_pages: int  # of the pool, the padding page among them


def last_windows(
    rows: int, window: int, context: int, block: int, device: torch.device | str
) -> Batch:
    """Return the last `window` positions of each of `rows` sequences of length `context`.

    A window takes all of its context where that is shorter.
    """
    window = min(window, context)
    pages = -(-context // PAGE_SIZE)
    order = torch.randperm(rows * pages) + 1
    pages_WP = order.view(rows, pages)
    start = context - window
    positions = torch.arange(start, context).repeat(rows)
    row = torch.arange(rows).repeat_interleave(window)
    slots = pages_WP[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def each(value: int) -> Tensor:
        return torch.full((rows,), value, dtype=torch.int32, device=device)

    first = torch.arange(rows + 1, dtype=torch.int32, device=device) * window
    paged = PagedWindows(
        first, each(start), each(context), each(block), pages_WP.int().to(device), PAGE_SIZE, window
    )
    return Batch(paged, positions.to(device), slots.to(device), context, rows * pages + 1)
