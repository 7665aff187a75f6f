"""Rotary position embedding in the rotate-half form, over all or the first dimensions of a head.

Letters: T packed tokens, N heads of any kind, D head size, R rotated size (even, at most D),
P positions.
"""

import torch
from torch import Tensor

from diffray.kernels.rope_scaling import Rope


def rope_tables(rope: Rope, rotated: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [P, R]; sin carries the sign of rotate-half in its first half."""
    positions = torch.arange(rope.positions, dtype=dtype)
    angles = torch.outer(positions, rope.frequencies(rotated, dtype))
    cos_PR, sin_PR = angles.cos().repeat(1, 2) * rope.magnitude, angles.sin() * rope.magnitude
    return cos_PR, torch.cat([-sin_PR, sin_PR], dim=1)


def rope_frequencies(size: int, theta: float, share: float) -> Tensor:
    """Return the frequencies of a head's pairs in float32; only the first `share` of them turns."""
    pairs = torch.arange(0, size, 2, dtype=torch.float32)
    frequencies = 1.0 / theta ** (pairs / size)
    return frequencies.masked_fill(pairs >= 2 * int(share * size // 2), 0.0)


def rope_angles(positions_T: Tensor, frequencies_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, 1, R] of these positions, as `rope_tables` does for all."""
    angles_T1P = positions_T.to(frequencies_P).view(-1, 1, 1) * frequencies_P
    cos_T1P, sin_T1P = angles_T1P.cos(), angles_T1P.sin()
    return torch.cat([cos_T1P, cos_T1P], -1), torch.cat([-sin_T1P, sin_T1P], -1)


def rotate(x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate the first R dimensions of each head, in the tables' dtype; the rest passes through."""
    rotated = cos_T1R.shape[-1]
    head = x_TND[..., :rotated]
    wide = head.to(cos_T1R.dtype)
    turned = torch.addcmul(wide * cos_T1R, wide.roll(rotated // 2, dims=-1), sin_T1R)
    turned = turned.to(x_TND.dtype)
    if rotated == x_TND.shape[-1]:
        return turned
    return torch.cat([turned, x_TND[..., rotated:]], dim=-1)
