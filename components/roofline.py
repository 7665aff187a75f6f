"""The least time of a step: every byte moved once, or every operation, on a processor.

For each product the longer of two times counts: its bytes at a bandwidth, or its operations at a
rate. Weights are read once, those of experts if a token meets them, and K/V once; activations are
read and written at each product. Norms, routing, ranks' collectives and the time between kernels
count nothing. Without torch.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Ceilings(NamedTuple):
    """What a processor can do."""

    bytes_per_s: float
    flops_per_s: float


class Part(NamedTuple):
    """Equal products in a step: how many, and what each moves and computes."""

    calls: int
    bytes: float
    flops: float

    @staticmethod
    def matrix(
        calls: int, tokens: float, size: tuple[int, int], weights: float, itemsize: int = 2
    ) -> "Part":
        """Return products of tokens with matrices of `size`, of which `weights` bytes are read."""
        inputs, outputs = size
        moved = weights + itemsize * tokens * (inputs + outputs)
        return Part(calls, moved, 2.0 * tokens * inputs * outputs)


def least_seconds(parts: Iterable[Part], found: Ceilings) -> float:
    """Return the least time of a step of these products."""
    return sum(
        part.calls * max(part.bytes / found.bytes_per_s, part.flops / found.flops_per_s)
        for part in parts
    )


def distinct_experts(experts: int, chosen: int, tokens: int) -> float:
    """Return how many of a layer's experts the tokens meet, if all are equally likely."""
    return experts * (1 - (1 - chosen / experts) ** tokens)
