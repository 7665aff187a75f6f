"""What a deployed model is configured by: the `args` of `serve run`, `build` and `deploy`.

Shaped like Ray Serve LLM's LLMConfig. Serve's own schema lets unknown keys pass; here each is an
error, and so is a key that would have no effect.
"""

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from diffray.cluster.api.defaults import GenerationDefaults
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.control.engine_config import EngineConfig
from diffray.components.config import Config, explain
from diffray.components.policy import DiffusionParams

Bundle = dict[str, Annotated[float, Field(gt=0)]]


class ModelLoading(Config):
    """Which model: its name in requests, and where its checkpoint is (left out: the same)."""

    model_id: str = Field(min_length=1)
    model_source: str | None = Field(None, min_length=1)  # a folder, a hub id, a demo's name


class Autoscaling(Config):
    """Serve's autoscaling, by tokens still to be written or, as Serve does it, by requests."""

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(ge=1)
    initial_replicas: int | None = Field(None, ge=0)
    target_ongoing_tokens: float | None = Field(None, gt=0)  # a replica's; None: by max_num_seqs
    target_ongoing_requests: float | None = Field(None, gt=0)
    upscale_delay_s: float = Field(10.0, ge=0)
    downscale_delay_s: float = Field(300.0, ge=0)
    downscale_to_zero_delay_s: float | None = Field(None, ge=0)
    upscaling_factor: float | None = Field(None, gt=0)
    downscaling_factor: float | None = Field(None, gt=0)
    look_back_period_s: float = Field(15.0, gt=10)  # replicas report every 10 s
    aggregation_function: Literal["mean", "max", "min"] = "mean"

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
    """How Serve refuses a request where it cannot be queued any more."""

    status_code: Literal[429, 503] = 429
    retry_after_s: float | None = Field(1.0, ge=0)


class Deployment(Config):
    """What Serve is told about the deployment; the names are Serve's."""

    num_replicas: int | None = Field(None, ge=1)
    autoscaling_config: Autoscaling | None = None
    max_ongoing_requests: int | None = Field(None, ge=1)  # None: all that the engine takes
    max_queued_requests: int = Field(1024, ge=-1)  # at each proxy; -1: no limit
    backpressure_config: Backpressure = Backpressure()
    health_check_period_s: float = Field(2.0, gt=0)
    health_check_timeout_s: float = Field(10.0, gt=0)
    graceful_shutdown_wait_loop_s: float = Field(1.0, gt=0)
    graceful_shutdown_timeout_s: float = Field(120.0, ge=0)
    max_surge_percent: int = Field(0, ge=0, le=100)
    max_constructor_retry_count: int = Field(20, ge=1)

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> Self:
        if self.num_replicas is not None and self.autoscaling_config is not None:
            raise ValueError("give num_replicas or autoscaling_config, not both")
        if self.max_queued_requests == 0:
            raise ValueError("max_queued_requests: 0 is not allowed; give -1 (no limit) or more")
        return self


class PlacementGroup(Config):
    """Where a replica's ranks may be: on one node, unless PACK or a SPREAD allows several."""

    strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    bundle_per_worker: Bundle | None = None  # a rank's resources; None: a GPU and a CPU
    bundles: tuple[Bundle, ...] | None = None  # or one for each rank; the replica's own is added

    @model_validator(mode="after")
    def _one_way_to_say(self) -> Self:
        if self.bundle_per_worker is not None and self.bundles is not None:
            raise ValueError("give bundle_per_worker or bundles, not both")
        return self


class AppConfig(Config):
    """One model behind one endpoint."""

    model_loading_config: ModelLoading
    engine_kwargs: EngineConfig = EngineConfig()
    accelerator_type: str | None = None  # Ray's name: L4, A100, H100, H200, ...
    deployment_config: Deployment = Deployment()
    placement_group_config: PlacementGroup = PlacementGroup()
    diffusion: DiffusionParams = DiffusionParams()  # decoder, cache, ...: the requests' default
    generation_defaults: GenerationDefaults = GenerationDefaults()  # of requests that do not say
    api: ApiSettings = ApiSettings()
    api_key_env: str | None = Field(None, min_length=1)  # a variable with keys, commas between
    request_timeout_s: float | None = Field(None, gt=0)  # which a choice may take

    @field_validator("accelerator_type")
    @classmethod
    def _known_to_ray(cls, given: str | None) -> str | None:
        if given is not None and given not in (known := accelerator_types()):
            raise ValueError(f"no {given!r}; allowed: {', '.join(sorted(known))}")
        return given

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        engine, ranks = self.engine_kwargs, self.engine_kwargs.tensor_parallel_size
        if self.accelerator_type is not None and engine.device == "cpu":
            raise ValueError("accelerator_type needs GPUs, but engine_kwargs.device is 'cpu'")
        if self.api.api_keys and self.api_key_env is not None:
            raise ValueError("give api.api_keys or api_key_env, not both")
        bundles = self.placement_group_config.bundles
        if bundles is not None and len(bundles) != ranks:
            raise ValueError(
                f"placement_group_config.bundles has {len(bundles)} bundles for {ranks} ranks; "
                "give one for each (the replica's own is added)"
            )
        return self

    @property
    def model_id(self) -> str:
        return self.model_loading_config.model_id

    @property
    def model_source(self) -> str:
        return self.model_loading_config.model_source or self.model_id

    def on(self, device: str) -> "AppConfig":
        """Return this configuration for a device that 'auto' turned out to be."""
        engine = self.engine_kwargs.model_copy(update={"device": device})
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return AppConfig(**(given | {"engine_kwargs": engine}))

    def api_settings(self, environment: Mapping[str, str] = os.environ) -> ApiSettings:
        """Return how the endpoint behaves, with the keys that the environment holds."""
        if self.api_key_env is None:
            return self.api
        text = environment.get(self.api_key_env, "")
        keys = tuple(key.strip() for key in text.split(",") if key.strip())
        if not keys:
            raise ValueError(f"api_key_env: the variable {self.api_key_env} holds no key; set it")
        try:
            return ApiSettings.model_validate(dict(self.api) | {"api_keys": keys})
        except ValidationError as error:
            raise ValueError(f"api_key_env ({self.api_key_env}): {explain(error)}") from None


def app_config(given: object, where: str = "args") -> AppConfig:
    """Return the configuration, or say in one sentence where in `where` it is wrong."""
    if not isinstance(given, dict):
        raise ValueError(
            f"{where}: options are needed, as model_loading_config (given: {given!r:.100})"
        )
    try:
        return AppConfig.model_validate(_as_options(given, where))
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error)}") from None


def accelerator_types() -> set[str]:
    """Return the names under which Ray knows NVIDIA's GPUs."""
    from ray.util.accelerators import accelerators

    return {value for name, value in vars(accelerators).items() if name.startswith("NVIDIA_")}


def _as_options(given: dict[Any, Any], where: str) -> dict[str, Any]:
    """Check that options have names; `serve run module:build NAME=JSON` gives values as text."""
    for key in given:
        if not isinstance(key, str):
            raise ValueError(f"{where}: the option {key!r} must be text")
    return {key: _parsed(value) for key, value in given.items()}


def _parsed(value: object) -> object:
    """Return the object that a text stands for; no option that is a text begins with a brace."""
    if not isinstance(value, str) or not value.startswith("{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
