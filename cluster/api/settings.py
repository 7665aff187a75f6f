"""Settings of the HTTP endpoint, independent of the model."""

from typing import Any

from pydantic import Field, field_validator

from diffray.cluster.api.keys import as_digest
from diffray.components.config import Config


class ApiSettings(Config):
    """By default the endpoint is open, but not to browsers on other origins."""

    # Any of them is accepted; empty: no key is needed. Plain text becomes sha256:..., so that logs,
    # replicas and dashboards never contain a key.
    api_keys: tuple[str, ...] = Field((), repr=False)
    max_body_bytes: int = Field(8 * 2**20, ge=1)
    body_timeout_s: float = Field(60.0, gt=0)  # from a request's headers to the end of its body
    cors_origins: tuple[str, ...] = ()  # allowed origins of browsers; "*": all
    vllm_metric_names: bool = False  # every metric also under vLLM's name
    docs: bool = True  # /docs and /openapi.json

    @field_validator("api_keys", mode="before")
    @classmethod
    def _digests(cls, given: Any) -> Any:
        """Run before pydantic's checks, whose errors would quote the keys."""
        if not isinstance(given, list | tuple) or not all(isinstance(key, str) for key in given):
            raise ValueError("expected a list of texts")
        return tuple(as_digest(key) for key in given)
