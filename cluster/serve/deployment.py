"""Turns a model's configuration into Serve's options: resources, limits, scaling."""

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from diffray.cluster.serve.app_config import INGRESS_OPTIONS, AppConfig, IngressConfig

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


REPLICA = "Replica"  # the name of each model's deployment within its application
REPLICA_BUNDLE = {"CPU": 1.0}  # the replica and its coordinator
REPLICA_CPUS = 0.5
TOKENS_PER_SEQUENCE = 256  # target tokens of a replica for each sequence that it can run at once
MARGIN = 64  # concurrent requests that need no engine: health, metrics, models
POLICY = "diffray.cluster.serve.deployment:OngoingTokensPolicy"


def deployment_options(config: AppConfig) -> dict[str, Any]:
    """Return the `serve.deployment(...).options`; placement and limits are always set."""
    given, engine = config.deployment_config, config.engine_kwargs
    options = given.model_dump(exclude={"num_replicas", "autoscaling_config", "prefix_routing"})
    if given.prefix_routing:
        from diffray.cluster.serve.prefix_routing import router_config

        options["request_router_config"] = router_config()
    options |= {
        "ray_actor_options": {"num_cpus": REPLICA_CPUS},
        "placement_group_bundles": placement_bundles(config),
        "placement_group_strategy": config.placement_group_config.strategy,
        # The engine's own queue refuses first, with OpenAI's error.
        "max_ongoing_requests": given.max_ongoing_requests or most_requests(config),
    }
    scaling = given.autoscaling_config
    if scaling is None:
        return options | {"num_replicas": given.num_replicas or 1}
    autoscaling = scaling.model_dump(exclude_none=True, exclude={"target_ongoing_tokens"})
    if scaling.target_ongoing_requests is None:  # otherwise Serve's own policy
        target = scaling.target_ongoing_tokens or float(TOKENS_PER_SEQUENCE * engine.max_num_seqs)
        autoscaling["policy"] = {
            "policy_function": POLICY,
            "policy_kwargs": {"target_ongoing_tokens": target},
        }
    return options | {"autoscaling_config": autoscaling}


def most_requests(config: AppConfig) -> int:
    """Return the most requests that a replica takes at once."""
    engine = config.engine_kwargs
    return engine.max_num_seqs + engine.max_queued_requests + MARGIN


def ingress_options(config: IngressConfig) -> dict[str, Any]:
    """Return the `serve.deployment(...).options` of an ingress."""
    return config.model_dump(include={*INGRESS_OPTIONS}) | {
        # Like proxies: an ingress must start wherever a model can, even next to all of them.
        "ray_actor_options": {"num_cpus": 0},
    }


def placement_bundles(config: AppConfig) -> list[dict[str, float]]:
    """Return a replica's resources: bundle 0 for itself, then one bundle per rank."""
    group, engine = config.placement_group_config, config.engine_kwargs
    each = group.bundle_per_worker or engine.rank_bundle
    bundles = group.bundles or (each,) * engine.tensor_parallel_size
    return [dict(REPLICA_BUNDLE), *(_checked(bundle, config) for bundle in bundles)]


def _checked(bundle: dict[str, float], config: AppConfig) -> dict[str, float]:
    """Return a rank's bundle with the accelerator type; refuse one that the rank cannot use."""
    device, count = config.engine_kwargs.device, bundle.get("GPU", 0.0)
    if device == "auto":
        raise ValueError(
            "engine_kwargs.device: cannot reserve resources for 'auto'; give 'cuda' or 'cpu'"
        )
    if device == "cpu" and count:
        raise ValueError("placement_group_config: a rank on the CPU uses no GPU; leave GPU out")
    if device != "cpu" and not 0 < count <= 1:
        raise ValueError(
            f"placement_group_config: a rank uses one GPU (given: {count:g}); write GPU: 1"
        )
    if config.accelerator_type is None:
        return dict(bundle)
    # Nodes of that type have 1 of this resource; bundles take too little to compete for it.
    return dict(bundle) | {f"accelerator_type:{config.accelerator_type}": 0.001}


def resources(config: AppConfig, replicas: int) -> Counter[str]:
    """Return the resources that `replicas` replicas reserve."""
    total = Counter[str]()
    for bundle in placement_bundles(config) * replicas:
        total.update(bundle)
    return total


def threads_of_ranks(configs: list[AppConfig], cores: int) -> int | None:
    """Return an equal share of the cores for the maximum number of ranks; None without CPU ranks.

    With more threads than cores, a rank's threads would wait for one without a core.
    """
    ranks = sum(
        config.deployment_config.most_replicas * config.engine_kwargs.tensor_parallel_size
        for config in configs
        if config.engine_kwargs.device == "cpu"
    )
    return max(cores // ranks, 1) if ranks else None
