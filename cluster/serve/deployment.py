"""How a model is deployed: replicas, scaling and placement, and Serve's options that follow."""

import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from diffray.components.config import Config

Bundle = dict[str, Annotated[float, Field(gt=0)]]


class ModelLoading(Config):
    """Which model to serve, and under which name."""

    model_id: str = Field(min_length=1, description="The model's name in requests.")
    model_source: str | None = Field(
        None,
        min_length=1,
        description="A checkpoint folder, a Hugging Face Hub id or a demo; default: the model_id.",
    )


class Autoscaling(Config):
    """Serve's autoscaling, by tokens still to be generated or, as in Serve itself, by requests."""

    min_replicas: int = Field(1, ge=0, description="The fewest replicas.")
    max_replicas: int = Field(ge=1, description="The most replicas.")
    initial_replicas: int | None = Field(
        None, ge=0, description="Replicas to start with; default: min_replicas."
    )
    target_ongoing_tokens: float | None = Field(
        None,
        gt=0,
        description="Tokens still to be generated per replica; default: 256 * max_num_seqs.",
    )
    target_ongoing_requests: float | None = Field(
        None, gt=0, description="Scale by requests per replica instead, with Serve's own policy."
    )
    upscale_delay_s: float = Field(10.0, ge=0, description="Seconds before adding replicas.")
    downscale_delay_s: float = Field(300.0, ge=0, description="Seconds before removing replicas.")
    downscale_to_zero_delay_s: float | None = Field(
        None, ge=0, description="Seconds before removing the last replica."
    )
    upscaling_factor: float | None = Field(
        None, gt=0, description="Scales each decision to add replicas, as in Ray Serve."
    )
    downscaling_factor: float | None = Field(
        None, gt=0, description="Scales each decision to remove replicas, as in Ray Serve."
    )
    look_back_period_s: float = Field(
        15.0,
        gt=10,
        description="Seconds over which the load is averaged; replicas report every 10 s.",
    )
    aggregation_function: Literal["mean", "max", "min"] = Field(
        "mean", description="How the load over that time is aggregated."
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) must not exceed max_replicas "
                f"({self.max_replicas})"
            )
        first = self.initial_replicas
        if first is not None and not self.min_replicas <= first <= self.max_replicas:
            raise ValueError(
                f"initial_replicas ({first}) must lie between min_replicas ({self.min_replicas}) "
                f"and max_replicas ({self.max_replicas})"
            )
        if self.target_ongoing_tokens is not None and self.target_ongoing_requests is not None:
            raise ValueError("give target_ongoing_tokens or target_ongoing_requests, not both")
        return self


class Backpressure(Config):
    """How Serve refuses a request that no longer fits the queue."""

    status_code: Literal[429, 503] = Field(429, description="The HTTP status of a refusal.")
    retry_after_s: float | None = Field(1.0, ge=0, description="Its Retry-After header.")


class Deployment(Config):
    """How many replicas Serve runs, and how it watches them."""

    num_replicas: int | None = Field(None, ge=1, description="The number of replicas; default: 1.")
    autoscaling_config: Autoscaling | None = Field(
        None, description="Scale the number of replicas, instead of num_replicas."
    )
    max_ongoing_requests: int | None = Field(
        None,
        ge=1,
        description="The most requests that a replica gets at once; default: all it accepts.",
    )
    max_queued_requests: int = Field(
        1024, ge=-1, description="The most requests to queue at each proxy; -1: no limit."
    )
    backpressure_config: Backpressure = Field(
        Backpressure(), description="How requests beyond that are refused."
    )
    health_check_period_s: float = Field(2.0, gt=0, description="Seconds between health checks.")
    health_check_timeout_s: float = Field(
        5.0,
        gt=0,
        description="Seconds after which a health check fails; three failures end a replica.",
    )
    graceful_shutdown_wait_loop_s: float = Field(
        1.0, gt=0, description="Seconds between checks whether a replica has finished."
    )
    graceful_shutdown_timeout_s: float = Field(
        120.0, ge=0, description="Seconds for running requests to finish when a replica ends."
    )
    max_surge_percent: int = Field(
        0, ge=0, le=100, description="Extra replicas during an update, in percent."
    )
    max_constructor_retry_count: int = Field(20, ge=1, description="Attempts to start a replica.")
    prefix_routing: bool = Field(
        False,
        description="Send requests with a common prefix, such as the turns of a conversation, to "
        "the replica that holds its K/V, unless that one is too busy.",
    )

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> Self:
        if self.num_replicas is not None and self.autoscaling_config is not None:
            raise ValueError("give num_replicas or autoscaling_config, not both")
        if self.max_queued_requests == 0:
            raise ValueError("max_queued_requests: 0 is not allowed; give -1 (no limit) or more")
        if self.prefix_routing and self.most_replicas == 1:
            raise ValueError("prefix_routing chooses between replicas, and there is only one")
        return self

    @property
    def most_replicas(self) -> int:
        scaling = self.autoscaling_config
        return scaling.max_replicas if scaling is not None else self.num_replicas or 1

    @property
    def fewest_replicas(self) -> int:
        scaling = self.autoscaling_config
        return scaling.min_replicas if scaling is not None else self.num_replicas or 1

    @property
    def first_replicas(self) -> int:
        """The initial number of replicas; at least 1, which the first request would start."""
        scaling = self.autoscaling_config
        if scaling is None:
            return self.num_replicas or 1
        return max(scaling.initial_replicas or scaling.min_replicas, 1)


class PlacementGroup(Config):
    """Where a replica's ranks may run: on one node, unless PACK or SPREAD allows several."""

    strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "STRICT_PACK",
        description="STRICT_PACK keeps a replica's ranks on one node; PACK lets them span nodes.",
    )
    bundle_per_worker: Bundle | None = Field(
        None,
        description="A rank's resources; default: a GPU and a CPU, or on CPUs cpu_threads CPUs.",
    )
    bundles: tuple[Bundle, ...] | None = Field(
        None, description="The resources of each rank; the replica's own bundle is added."
    )

    @model_validator(mode="after")
    def _given_once(self) -> Self:
        if self.bundle_per_worker is not None and self.bundles is not None:
            raise ValueError("give bundle_per_worker or bundles, not both")
        return self


if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from diffray.cluster.serve.app_config import AppConfig, IngressConfig

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
_INGRESS_OPTIONS = {"num_replicas", "max_ongoing_requests", "graceful_shutdown_timeout_s"}
MARGIN = 64  # concurrent requests that need no engine: health, metrics, models
POLICY = "diffray.cluster.serve.deployment:OngoingTokensPolicy"


def deployment_options(config: "AppConfig") -> dict[str, Any]:
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


def most_requests(config: "AppConfig") -> int:
    """Return the most requests that a replica takes at once."""
    engine = config.engine_kwargs
    return engine.max_num_seqs + engine.max_queued_requests + MARGIN


def ingress_options(config: "IngressConfig") -> dict[str, Any]:
    """Return the `serve.deployment(...).options` of an ingress."""
    return config.model_dump(include=_INGRESS_OPTIONS) | {
        # Like proxies: an ingress must start wherever a model can, even next to all of them.
        "ray_actor_options": {"num_cpus": 0},
    }


def placement_bundles(config: "AppConfig") -> list[dict[str, float]]:
    """Return a replica's resources: bundle 0 for itself, then one bundle per rank."""
    group, engine = config.placement_group_config, config.engine_kwargs
    each = group.bundle_per_worker or engine.rank_bundle
    bundles = group.bundles or (each,) * engine.tensor_parallel_size
    return [dict(REPLICA_BUNDLE), *(_checked(bundle, config) for bundle in bundles)]


def _checked(bundle: dict[str, float], config: "AppConfig") -> dict[str, float]:
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


def resources(config: "AppConfig", replicas: int) -> Counter[str]:
    """Return the resources that `replicas` replicas reserve."""
    total = Counter[str]()
    for bundle in placement_bundles(config) * replicas:
        total.update(bundle)
    return total


def threads_of_ranks(configs: "list[AppConfig]", cores: int) -> int | None:
    """Return an equal share of the cores for the maximum number of ranks; None without CPU ranks.

    With more threads than cores, a rank's threads would wait for one without a core.
    """
    ranks = sum(
        config.deployment_config.most_replicas * config.engine_kwargs.tensor_parallel_size
        for config in configs
        if config.engine_kwargs.device == "cpu"
    )
    return max(cores // ranks, 1) if ranks else None
