"""Reads comma-separated lists of numbers; a benchmark runs once for each number."""

from math import inf, isfinite


def numbers(text: str, flag: str, *, low: float = 0.0, high: float = inf) -> list[float]:
    """Return the numbers of a comma-separated list, each between the bounds."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} {text!r} is not a list of numbers such as 1,2,4") from None
    for number in found:
        if not low <= number <= high:
            most = f" to {high:g}" if isfinite(high) else " or more"
            raise ValueError(f"{flag} must be {low:g}{most} (given: {number:g})")
    return found


def counts(text: str, flag: str, *, high: float = inf) -> list[int]:
    """Return the whole numbers of a comma-separated list, each at least 1."""
    found = numbers(text, flag, low=1, high=high)
    if not all(number.is_integer() for number in found):
        raise ValueError(f"{flag} must be whole numbers (given: {text})")
    return [int(number) for number in found]
