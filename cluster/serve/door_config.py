"""The configuration of a door: the `args` of `diffray.cluster.app:door`."""

import os
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from diffray.cluster.api.settings import ApiSettings
from diffray.components.config import Config, explain

DOOR_OPTIONS = ("num_replicas", "max_ongoing_requests", "graceful_shutdown_timeout_s")
_Name = Annotated[str, Field(min_length=1)]


class DoorConfig(Config):
    """One endpoint for several models, which passes each request to the model it names."""

    models: dict[_Name, _Name] = Field(
        min_length=1,
        description="The application of each model, by the model's name in requests; "
        "in a file: all models of the file.",
    )
    num_replicas: int = Field(
        1, ge=1, description="The number of doors; in a file: 2 if a model has several replicas."
    )
    max_ongoing_requests: int = Field(
        4096,
        ge=1,
        description="The most requests of a door at once; in a file: all that the models accept.",
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


def door_config(given: object, where: str = "args") -> DoorConfig:
    """Return the configuration; raise ValueError with one sentence on the mistake in `where`."""
    if not isinstance(given, dict):
        raise ValueError(f"{where}: expected a mapping with models (given: {given!r:.100})")
    try:
        return DoorConfig.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error)}") from None
