"""Which model is deployed, with how many replicas and where: Ray Serve's options and names."""

from typing import Annotated, Literal, Self

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
