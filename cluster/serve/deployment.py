"""Turns a model's configuration into Serve's options: resources, limits, scaling."""

import math
from typing import Any

from diffray.cluster.serve.app_config import AppConfig, Autoscaling

REPLICA_BUNDLE = {"CPU": 1.0}  # the replica and its coordinator
REPLICA_CPUS = 0.5
TOKENS_PER_SEQUENCE = 256  # target tokens of a replica, per sequence that it runs at once
MARGIN = 64  # concurrent requests without the engine: health, metrics, models
POLICY = "diffray.cluster.serve.autoscaling:OngoingTokensPolicy"


def placement_bundles(config: AppConfig) -> list[dict[str, float]]:
    """Return a replica's resources: bundle 0 for itself, then one bundle per rank."""
    group, ranks = config.placement_group_config, config.engine_kwargs.tensor_parallel_size
    own = group.bundle_per_worker or _rank_bundle(config)
    each = group.bundles if group.bundles is not None else (own,) * ranks
    return [dict(REPLICA_BUNDLE), *(_checked(bundle, config) for bundle in each)]


def deployment_options(config: AppConfig) -> dict[str, Any]:
    """Return the `serve.deployment(...).options`; placement and limits are always set."""
    wish, engine = config.deployment_config, config.engine_kwargs
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": REPLICA_CPUS},
        "placement_group_bundles": placement_bundles(config),
        "placement_group_strategy": config.placement_group_config.strategy,
        # The engine's own queue refuses first, with OpenAI's error.
        "max_ongoing_requests": wish.max_ongoing_requests
        or engine.max_num_seqs + engine.max_queued_requests + MARGIN,
        "max_queued_requests": wish.max_queued_requests,
        "backpressure_config": wish.backpressure_config.model_dump(),
        "health_check_period_s": wish.health_check_period_s,
        "health_check_timeout_s": wish.health_check_timeout_s,
        "graceful_shutdown_wait_loop_s": wish.graceful_shutdown_wait_loop_s,
        "graceful_shutdown_timeout_s": wish.graceful_shutdown_timeout_s,
        "max_surge_percent": wish.max_surge_percent,
        "max_constructor_retry_count": wish.max_constructor_retry_count,
    }
    if wish.autoscaling_config is None:
        return options | {"num_replicas": wish.num_replicas or 1}
    scaling = _autoscaling(wish.autoscaling_config, engine.max_num_seqs)
    return options | {"autoscaling_config": scaling}


def most_replicas(config: AppConfig) -> int:
    """Return the maximum number of replicas."""
    wish = config.deployment_config
    if wish.autoscaling_config is not None:
        return wish.autoscaling_config.max_replicas
    return wish.num_replicas or 1


def first_replicas(config: AppConfig) -> int:
    """Return the initial number of replicas; one if the first request starts one."""
    wish = config.deployment_config
    scaling = wish.autoscaling_config
    if scaling is not None:
        return max(scaling.initial_replicas or scaling.min_replicas, 1)
    return wish.num_replicas or 1


def gpus(bundles: list[dict[str, float]]) -> int:
    """Return the number of whole GPUs in these bundles."""
    return math.ceil(sum(bundle.get("GPU", 0.0) for bundle in bundles))


def _autoscaling(wish: Autoscaling, max_num_seqs: int) -> dict[str, Any]:
    """Return Serve's autoscaling options; its own policy only with a target in requests."""
    options = wish.model_dump(exclude_none=True, exclude={"target_ongoing_tokens"})
    if wish.target_ongoing_requests is not None:
        return options
    target = wish.target_ongoing_tokens or float(TOKENS_PER_SEQUENCE * max_num_seqs)
    policy = {"policy_function": POLICY, "policy_kwargs": {"target_ongoing_tokens": target}}
    return options | {"policy": policy}


def _rank_bundle(config: AppConfig) -> dict[str, float]:
    engine = config.engine_kwargs
    if engine.device == "cpu":
        return {"CPU": float(engine.cpu_threads or 1)}
    return {"GPU": 1.0, "CPU": 1.0}


def _checked(bundle: dict[str, float], config: AppConfig) -> dict[str, float]:
    """Return a rank's bundle with the accelerator type; refuse one that the rank cannot use."""
    device, count = config.engine_kwargs.device, bundle.get("GPU", 0.0)
    if device == "auto":
        raise ValueError(
            "engine_kwargs.device: 'auto' does not say what to reserve; give 'cuda' or 'cpu'"
        )
    if device == "cpu" and count:
        raise ValueError("placement_group_config: a rank on the CPU uses no GPU; leave GPU out")
    if device != "cpu" and not 0 < count <= 1:
        raise ValueError(f"placement_group_config: a rank uses one GPU (given: {count:g}); GPU: 1")
    if config.accelerator_type is None:
        return dict(bundle)
    # Ray's mark of nodes with that type; bundles take so little that they do not compete for it.
    return dict(bundle) | {f"accelerator_type:{config.accelerator_type}": 0.001}
