"""Settings of the HTTP endpoint, independent of the model."""

from typing import Any

from pydantic import Field, field_validator

from diffray.cluster.api.keys import as_digest
from diffray.components.config import Config


class ApiSettings(Config):
    """By default the endpoint is open, but not to browsers on other origins."""

    # Held as digests: what is logged, sent to replicas or shown on a dashboard holds no key.
    api_keys: tuple[str, ...] = Field(
        (),
        repr=False,
        description="API keys, of which a request must send one; as they are or as sha256:DIGEST. "
        "Default: no key is needed.",
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1, description="The largest body of a request.")
    body_timeout_s: float = Field(
        60.0, gt=0, description="Seconds from a request's headers to the end of its body."
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description="Origins that browsers may send requests from, such as "
        "https://chat.example.com, or * for all.",
    )
    vllm_metric_names: bool = Field(False, description="Show every metric under vLLM's name too.")
    docs: bool = Field(True, description="Serve /docs and /openapi.json.")

    @field_validator("api_keys", mode="before")
    @classmethod
    def _digests(cls, given: Any) -> Any:
        """Run before pydantic's checks, whose errors would quote the keys."""
        if not isinstance(given, list | tuple) or not all(isinstance(key, str) for key in given):
            raise ValueError("expected a list of texts")
        return tuple(as_digest(key) for key in given)
