"""Scales replicas by the tokens that a deployment still has to generate.

Serve pickles the policy by value and calls it in its controller, so this file imports nothing of
the project. Serve itself applies scaling factors, delays and, once more, the bounds.
"""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

# What a replica reports in `record_autoscaling_stats`: the tokens that its waiting and running
# requests may still generate.
ONGOING_TOKENS = "ongoing_tokens"


class OngoingTokensPolicy:
    """One replica per `target_ongoing_tokens` still to be generated."""

    def __init__(self, target_ongoing_tokens: float) -> None:
        self.target = target_ongoing_tokens

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """Return the target number of replicas, and no state: Serve tracks its delays itself."""
        reported = (context.aggregated_metrics or {}).get(ONGOING_TOKENS)
        if not reported:
            return context.target_num_replicas, {}  # no replica has reported yet
        # Requests that no replica has accepted yet count with the average length.
        queued = (context.total_queued_requests or 0.0) / max(context.total_running_requests, 1.0)
        tokens = sum(reported.values()) * (1 + queued)
        # Serve averages over time; a rounding error must not add a replica.
        replicas = math.ceil(tokens / self.target - 1e-6)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(replicas, low), high), {}
