"""When requests are sent, whether or not earlier ones are answered: an open loop."""

import random
from dataclasses import dataclass
from math import inf, isinf
from typing import Final

STRATEGIES: Final = ("linear", "exponential")


@dataclass(frozen=True, slots=True)
class RampUp:
    """A rate that grows over the requests, from `start` to `end` a second."""

    strategy: str
    start: float
    end: float

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"--ramp-up-strategy is one of {', '.join(STRATEGIES)}")
        if not 0 < self.start <= self.end:
            raise ValueError(
                "--ramp-up-start-rps must be above 0 and --ramp-up-end-rps not below it "
                f"(given: {self.start:g} and {self.end:g})"
            )

    def rate(self, index: int, count: int) -> float:
        progress = index / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)


def arrivals(
    count: int, rate: float, *, burstiness: float = 1.0, ramp: RampUp | None = None, seed: int = 0
) -> list[float]:
    """Return the second at which each request is sent; an infinite rate sends all at once.

    Gaps are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is
    more bursty, infinity is regular. At a constant rate the last request is sent at count / rate,
    whatever was drawn.
    """
    if not (burstiness > 0 and rate > 0):  # as written, it refuses nan too
        raise ValueError("--request-rate and --burstiness must be above 0")
    draws = random.Random(seed)
    times, now = [], 0.0
    for index in range(count):
        current = ramp.rate(index, count) if ramp else rate
        if isinf(current):
            gap = 0.0
        elif isinf(burstiness):
            gap = 1 / current
        else:
            gap = draws.gammavariate(burstiness, 1 / (current * burstiness))
        now += gap
        times.append(now)
    if ramp is None and rate < inf and now:
        times = [time * count / rate / now for time in times]
    return times
