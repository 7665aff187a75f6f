"""How the HTTP endpoint behaves, whatever model is behind it."""

from pydantic import Field

from diffray.components.config import Config


class ApiSettings(Config):
    """The default is an open endpoint for clients that are no browsers."""

    api_keys: tuple[str, ...] = Field((), repr=False)  # any of them is accepted; none: all may ask
    max_body_bytes: int = Field(8 * 2**20, ge=1)
    cors_origins: tuple[str, ...] = ()  # of browsers that may ask; "*": all
    vllm_metric_names: bool = False  # every metric once more under vLLM's name
    docs: bool = True  # /docs and /openapi.json
