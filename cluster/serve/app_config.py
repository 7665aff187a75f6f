"""The configuration of a deployed model: the `args` of `serve run`, `build` and `deploy`.

It is shaped like Ray Serve LLM's LLMConfig. Serve's own schema ignores unknown keys; here they are
errors, and so are keys that would have no effect.
"""

import json
import os
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from diffray.cluster.api.settings import ApiSettings, GenerationDefaults
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.deployment import Deployment, ModelLoading, PlacementGroup
from diffray.components.config import Config, explain
from diffray.components.policy import DiffusionParams

_Name = Annotated[str, Field(min_length=1)]


class IngressConfig(Config):
    """One endpoint for several models, which passes each request to the model it names."""

    models: dict[_Name, _Name] = Field(
        min_length=1,
        description="The application of each model, by the model's name in requests; "
        "in a file: all models of the file.",
    )
    num_replicas: int = Field(
        1,
        ge=1,
        description="How many replicas the ingress has; in a file: 2 if a model has several.",
    )
    max_ongoing_requests: int = Field(
        4096,
        ge=1,
        description="The most requests that a replica of the ingress takes at once; in a file: "
        "all that the models accept.",
    )
    graceful_shutdown_timeout_s: float = Field(
        120.0,
        ge=0,
        description="Seconds for running requests to finish; in a file: the longest of the models.",
    )
    api: ApiSettings = Field(
        ApiSettings(), description="How the HTTP endpoint behaves; in a file: as for the models."
    )
    api_key_env: str | None = Field(
        None,
        min_length=1,
        description="The environment variable with the API keys; in a file: that of the models.",
    )
    operator_key_env: str | None = Field(
        None,
        min_length=1,
        description="The environment variable with the operators' keys; in a file: likewise.",
    )

    @model_validator(mode="after")
    def _keys_are_given_once(self) -> Self:
        self.api.refuse_keys_beside(self.api_key_env, self.operator_key_env)
        return self

    def api_settings(self, environment: Mapping[str, str] = os.environ) -> ApiSettings:
        """Return the endpoint's settings, with the keys from the environment."""
        return self.api.with_keys_of(self.api_key_env, self.operator_key_env, environment)


def ingress_config(given: object, where: str = "args") -> IngressConfig:
    """Return the configuration; raise ValueError with one sentence on the mistake in `where`."""
    if not isinstance(given, dict):
        raise ValueError(f"{where}: expected a mapping with models (given: {given!r:.100})")
    try:
        return IngressConfig.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error)}") from None


class AppConfig(Config):
    """One model behind one endpoint."""

    model_loading_config: ModelLoading = Field(description="Which model to serve.")
    engine_kwargs: EngineConfig = Field(
        EngineConfig(), description="The engine's options: see Engine."
    )
    accelerator_type: str | None = Field(
        None, description="Run only on these GPUs, under Ray's name, such as H100."
    )
    deployment_config: Deployment = Field(
        Deployment(), description="Replicas, scaling and health checks."
    )
    placement_group_config: PlacementGroup = Field(
        PlacementGroup(), description="Where a replica's ranks may run."
    )
    diffusion: DiffusionParams = Field(
        DiffusionParams(), description="Default diffusion parameters."
    )
    generation_defaults: GenerationDefaults = Field(
        GenerationDefaults(), description="The default sampling parameters of requests."
    )
    api: ApiSettings = Field(ApiSettings(), description="How the HTTP endpoint behaves.")
    api_key_env: str | None = Field(
        None,
        min_length=1,
        description="The environment variable with the API keys, separated by commas.",
    )
    operator_key_env: str | None = Field(
        None,
        min_length=1,
        description="The environment variable with the operators' keys, separated by commas.",
    )
    request_timeout_s: float | None = Field(
        None, gt=0, description="The most seconds that an answer may take; default: no limit."
    )

    @field_validator("accelerator_type")
    @classmethod
    def _known_to_ray(cls, given: str | None) -> str | None:
        if given is not None and given not in (known := accelerator_types()):
            raise ValueError(f"unknown type {given!r}; Ray knows {', '.join(sorted(known))}")
        return given

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        engine, ranks = self.engine_kwargs, self.engine_kwargs.tensor_parallel_size
        if self.accelerator_type is not None and engine.device == "cpu":
            raise ValueError("accelerator_type needs GPUs, but engine_kwargs.device is 'cpu'")
        if self.deployment_config.prefix_routing and engine.enable_prefix_caching is False:
            raise ValueError("prefix_routing has no effect without enable_prefix_caching")
        self.api.refuse_keys_beside(self.api_key_env, self.operator_key_env)
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
        """Return a copy for this device, to which 'auto' was resolved."""
        engine = self.engine_kwargs.model_copy(update={"device": device})
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return AppConfig(**(given | {"engine_kwargs": engine}))

    def api_settings(self, environment: Mapping[str, str] = os.environ) -> ApiSettings:
        """Return the endpoint's settings, with the keys from the environment."""
        return self.api.with_keys_of(self.api_key_env, self.operator_key_env, environment)


def app_config(
    given: object, where: str = "args", flags: Mapping[str, str] | None = None
) -> AppConfig:
    """Return the configuration; raise ValueError with one sentence on the mistake in `where`.

    The sentence names the flag instead of an option's path, if flags set the options.
    """
    if not isinstance(given, dict):
        raise ValueError(
            f"{where}: expected a mapping with model_loading_config (given: {given!r:.100})"
        )
    for key in given:
        if not isinstance(key, str):
            raise ValueError(f"{where}: the option {key!r} must be text")
    try:
        return AppConfig.model_validate({key: _parsed(value) for key, value in given.items()})
    except ValidationError as error:
        place = "" if flags else f"{where}: "
        raise ValueError(f"{place}{explain(error, flags)}") from None


def accelerator_types() -> set[str]:
    from ray.util.accelerators import accelerators

    return {value for name, value in vars(accelerators).items() if name.startswith("NVIDIA_")}


def _parsed(value: object) -> object:
    """Parse an object given as JSON text, as in `serve run module:build NAME=JSON`."""
    if not isinstance(value, str) or not value.startswith("{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
