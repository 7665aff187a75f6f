"""The rotation frequencies of a head's pairs, also of models stretched to longer contexts.

`linear` (Chen et al., 2023) turns all pairs more slowly, `yarn` (Peng et al., 2023) those that
hardly turn in the context that the model was first trained for, and `llama3` is Meta's variant.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Stretch = Literal["default", "linear", "yarn", "llama3"]


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of a model; `fast` and `slow` bound the turns within the `trained` positions.

    Pairs with more turns than `fast` stay as they are, and those with fewer than `slow` are turned
    `factor` times more slowly.
    """

    theta: float
    positions: int  # of the longest text
    stretch: Stretch = "default"
    factor: float = 1.0
    trained: int = 0
    fast: float = 32.0
    slow: float = 1.0
    whole: bool = True  # whether `yarn` rounds its bounds to whole pairs
    magnitude: float = 1.0  # of cos and sin
    query_growth: float = 0.0  # of queries beyond the trained positions (Llama 4); 0: none

    def frequencies(self, rotated: int, dtype: torch.dtype) -> Tensor:
        """Return the angle by which each pair turns from one position to the next."""
        pair_P = torch.arange(0, rotated, 2, dtype=dtype)
        plain_P = 1.0 / self.theta ** (pair_P / rotated)
        match self.stretch:
            case "default":
                return plain_P
            case "linear":
                return plain_P / self.factor
            case "yarn":
                kept_P = self._kept_by_pair(rotated, dtype)
            case "llama3":
                turns_P = self.trained * plain_P / (2 * math.pi)
                kept_P = ((turns_P - self.slow) / (self.fast - self.slow)).clamp(0, 1)
        return plain_P * kept_P + plain_P / self.factor * (1 - kept_P)

    def query_scales(self) -> Tensor:
        """Return the multiplier of a query at each position."""
        lengths_P = torch.arange(self.positions) // self.trained
        return 1 + self.query_growth * torch.log1p(lengths_P.float())

    def _kept_by_pair(self, rotated: int, dtype: torch.dtype) -> Tensor:
        """Return 1 for fast pairs and 0 for slow ones, and a ramp over the pairs between."""

        def pair_with(turns: float) -> float:
            length = self.trained / (2 * math.pi * turns)
            return rotated * math.log(length) / (2 * math.log(self.theta))

        first, last = pair_with(self.fast), pair_with(self.slow)
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotated - 1)
        ramp_P = torch.arange(rotated // 2, dtype=dtype) - first
        return 1 - (ramp_P / (last - first or 0.001)).clamp(0, 1)
