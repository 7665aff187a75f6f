"""Scales replicas by the tokens that a deployment still has to generate.

Serve pickles the policy by value and calls it in its controller, so this file imports nothing of
the project. Serve itself applies scaling factors, delays and, once more, the bounds.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

# What a replica reports in `record_autoscaling_stats`: the tokens that its waiting and running
# requests may still generate.
ONGOING_TOKENS = "ongoing_tokens"


class Context(Protocol):
    """The part of Serve's AutoscalingContext that the policy reads."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...
    @property
    def total_running_requests(self) -> float: ...
    @property
    def total_queued_requests(self) -> float | None: ...
    @property
    def target_num_replicas(self) -> int: ...
    @property
    def capacity_adjusted_min_replicas(self) -> int: ...
    @property
    def capacity_adjusted_max_replicas(self) -> int: ...


class OngoingTokensPolicy:
    """One replica per `target_ongoing_tokens` still to be generated."""

    def __init__(self, target_ongoing_tokens: float) -> None:
        self.target = target_ongoing_tokens

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """Return the target number of replicas, and no state: Serve keeps that of its delays."""
        reported = (context.aggregated_metrics or {}).get(ONGOING_TOKENS)
        if not reported:
            return context.target_num_replicas, {}  # no replica has reported yet
        tokens = with_queued(
            sum(reported.values()),
            running=context.total_running_requests,
            queued=context.total_queued_requests or 0.0,
        )
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return replicas_for(tokens, self.target, low, high), {}


def with_queued(tokens: float, running: float, queued: float) -> float:
    """Add requests that no replica has accepted yet, each with the average length."""
    return tokens * (1 + queued / max(running, 1.0))


def replicas_for(tokens: float, target: float, low: int, high: int) -> int:
    """Return the least number of replicas with at most `target` tokens each, within bounds."""
    exact = tokens / target
    # Serve averages over time; a rounding error must not add a replica.
    return min(max(math.ceil(exact - 1e-6), low), high)
