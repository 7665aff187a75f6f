"""A checksum of integer tensors, which ranks compare to detect drift."""

import torch
from torch import Tensor

from diffray.kernels.noise import mix


def checksum(*parts: Tensor) -> Tensor:
    """Return a hash (int64, one element) of the low 32 bits of all values, in order."""
    total = torch.zeros(1, dtype=torch.long, device=parts[0].device)
    for number, part in enumerate(parts):
        values = part.flatten().long()
        place = mix(torch.arange(len(values), device=values.device) + (number << 24))
        total = total + mix(values ^ place).sum()
    return total
