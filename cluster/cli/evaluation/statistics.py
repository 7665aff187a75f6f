"""Estimates with intervals: of a mean, of a ratio, and of the difference of pairs."""

from collections.abc import Sequence
from math import comb, sqrt
from typing import Final, NamedTuple

import numpy as np

Z: Final = 1.959964  # of 95 %
_DRAWS: Final = 10_000


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

    The interval is Tango's for matched pairs: the differences that a score test does not reject.
    Scores between 0 and 1 vary less than it assumes.
    """
    pairs = np.subtract(other, first)
    gained, lost = float(pairs[pairs > 0].sum()), -float(pairs[pairs < 0].sum())
    value = (gained - lost) / len(pairs)
    low, high = -largest(lost, gained, len(pairs), z), largest(gained, lost, len(pairs), z)
    return Estimate(value, low, high)


def largest(gained: float, lost: float, n: float, z: float) -> float:
    """Return the largest difference that so many gains and losses in n pairs do not reject."""
    value = (gained - lost) / n
    low, high = value, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        spread = sqrt(max(_variance(gained, lost, n, middle), 0.0))
        if middle - value > z * spread:
            high = middle
        else:
            low = middle
    return low


def _variance(gained: float, lost: float, n: float, true: float) -> float:
    """Return the variance of the difference, estimated as if its true value were known."""
    if true < 0:
        return _variance(lost, gained, n, -true)
    k = gained + lost + true * (gained - lost) - 2 * n * true
    loss = (k + sqrt(k * k + 8 * n * lost * true * (1 - true))) / (4 * n)  # its likeliest rate
    return (2 * loss + true - true * true) / n


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
    draws = np.random.default_rng(0)
    sums = (float(draws.choice((-1.0, 1.0), n) @ pairs) for _ in range(_DRAWS))
    extreme = sum(abs(each) >= abs(float(pairs.sum())) - 1e-9 for each in sums)
    return (extreme + 1) / (_DRAWS + 1)


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
