"""Estimates with intervals: of a mean, of a ratio, and of the difference of pairs."""

from collections.abc import Sequence
from math import comb, sqrt
from typing import Final, NamedTuple

import numpy as np

Z: Final = 1.959964  # of 95 %
_DRAWS: Final = 20_000


class Estimate(NamedTuple):
    """A value, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether it has an interval, which takes several items."""
        return self.low < self.high


def mean(scores: Sequence[float]) -> Estimate:
    """Return the mean of scores from 0 to 1, with Wilson's interval.

    Scores between 0 and 1 vary less than this assumes, so their interval is too wide, if anything.
    """
    n = len(scores)
    value = sum(scores) / n
    middle = (value + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * sqrt(value * (1 - value) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    return Estimate(value, max(0.0, middle - half), min(1.0, middle + half))


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return sum(above) / sum(below) of independent pairs (linearised)."""
    over, under = np.asarray(above, float), np.asarray(below, float)
    if not under.sum():
        return Estimate(0.0, 0.0, 0.0)
    value = float(over.sum() / under.sum())
    if (n := len(over)) < 2:
        return Estimate(value, value, value)
    error = sqrt(float(((over - value * under) ** 2).sum()) * n / (n - 1)) / float(under.sum())
    return Estimate(value, max(0.0, value - Z * error), value + Z * error)


def difference(first: Sequence[float], other: Sequence[float], z: float = Z) -> Estimate:
    """Return the mean of other - first over the same items, whose scores are from 0 to 1.

    The interval is that of Agresti and Min for matched pairs: two items more, of which the halves
    differ by 1 and by -1. So equal scores of few items do not prove much.
    """
    pairs = np.subtract(other, first)
    n = len(pairs) + 2
    middle = float(pairs.sum()) / n
    half = z * sqrt((float((pairs**2).sum()) + 1) / n - middle**2) / sqrt(n)
    value = float(pairs.mean())
    return Estimate(value, min(value, middle - half), max(value, middle + half))


def p_value(first: Sequence[float], other: Sequence[float]) -> float:
    """Return the probability of a difference at least as large if both were equally good.

    The signs of the differences are exchangeable then: exact for right and wrong (McNemar's test),
    else over seeded draws.
    """
    pairs = np.subtract(other, first)
    pairs = pairs[pairs != 0]
    if (n := len(pairs)) == 0:
        return 1.0
    if set(np.abs(pairs)) == {1.0}:
        fewer = min(int((pairs > 0).sum()), int((pairs < 0).sum()))
        return min(1.0, 2 * sum(comb(n, k) for k in range(fewer + 1)) / (1 << n))
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (_DRAWS, n))
    extreme = np.abs(signs @ pairs) >= abs(pairs.sum()) - 1e-9
    return float(extreme.sum() + 1) / (_DRAWS + 1)


def pass_at(k: int, right: int, tries: int) -> float:
    """Return the unbiased estimate that one of k tries is right, from so many right ones."""
    return 1.0 - float(comb(tries - right, k)) / comb(tries, k)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans: the time in which any request ran."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total
