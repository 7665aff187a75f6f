"""Mean, deviation and percentiles as vLLM's benchmarks compute them, so that numbers compare."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, isfinite
from statistics import fmean, pstdev


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile, on the line between the two nearest values; of nothing, 0."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = min(floor(place), len(ordered) - 2) if len(ordered) > 1 else 0
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """How some values are spread; of nothing, zeros."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]

    @staticmethod
    def of(values: Sequence[float], percents: Sequence[float]) -> "Spread":
        return Spread(
            fmean(values) if values else 0.0,
            percentile(values, 50),
            pstdev(values) if values else 0.0,
            tuple((percent, percentile(values, percent)) for percent in percents),
        )


def as_word(number: float) -> str:
    """Return a percentile's name: 99, or 99.9."""
    return str(int(number)) if number == int(number) else str(number)


def span(values: Iterable[int]) -> str:
    """Return some whole numbers' range: 64, or 12 to 40."""
    found = sorted(values)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def numbers(text: str, what: str, *, low: float = 0.0, high: float = float("inf")) -> list[float]:
    """Return the numbers of a list typed with commas, each between the bounds."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{what} {text!r} is no list of numbers, as 1,2,4") from None
    for number in found:
        if not low <= number <= high:
            most = f" to {high:g}" if isfinite(high) else " or more"
            raise ValueError(f"{what} must be {low:g}{most} (given: {number:g})")
    return found


def counts(text: str, what: str, *, high: float = float("inf")) -> list[int]:
    """Return the whole numbers of a list typed with commas, each at least 1."""
    found = numbers(text, what, low=1, high=high)
    if not all(number.is_integer() for number in found):
        raise ValueError(f"{what} must be whole numbers (given: {text})")
    return [int(number) for number in found]
