"""The rows that draw tokens, of one request and of a batch."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.propose import Draws


class Draw(NamedTuple):
    """A sequence's rows that draw, and how."""

    rows: Tensor
    temperature: float
    top_k: int
    top_p: float
    min_p: float


def join_draws(parts: Items[Draw], device: torch.device) -> Draws | None:
    """Return how all these rows draw; None if there are none."""
    if not parts:
        return None

    def each(name: str, dtype: torch.dtype) -> Tensor:
        return repeated([(part.rows, getattr(part, name)) for part in parts], dtype, device)

    real = torch.float64
    return Draws(
        joined([part.rows for part in parts], device),
        each("temperature", real),
        each("top_k", torch.long) if any(part.top_k > 0 for part in parts) else None,
        each("top_p", real) if any(part.top_p < 1 for part in parts) else None,
        each("min_p", real) if any(part.min_p > 0 for part in parts) else None,
    )


def joined(parts: Iterable[Tensor], device: torch.device) -> Tensor:
    return send(torch.cat(list(parts)), device)


def repeated(
    parts: Iterable[tuple[Tensor, float]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return each part's value once for each of its rows."""
    return joined([torch.full((len(rows),), value, dtype=dtype) for rows, value in parts], device)
