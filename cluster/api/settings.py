"""Settings of the HTTP endpoint, with its API keys, and the default parameters of requests.

Keys are configured in plain text or as digests, and stored only as digests. Defaults are the
server's, then the checkpoint's, then diffray's. The last are OpenAI's except for the temperature,
which is 0: the models' own samplers take the most probable tokens, and many tokens sampled at once
at temperature 1 rarely fit together.
"""

import hmac
import logging
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import Field, ValidationError, create_model, field_validator

from diffray.components.checkpoints.folder import read_json
from diffray.components.config import Config, explain, not_given
from diffray.components.params import SamplingParams

_MARK: Final = "sha256:"
_DIGEST: Final = re.compile(rf"{_MARK}[0-9a-f]{{64}}")
_HOST: Final = re.compile(r"([a-z0-9._-]{1,253}|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?")
_KEY: Final = re.compile(r"[\x21-\x7e]{1,512}")  # characters that a header carries unchanged


class ApiSettings(Config):
    """By default no key is needed, and browsers on other origins have no access."""

    # Stored as digests, so that logs, messages to replicas and dashboards contain no key.
    api_keys: tuple[str, ...] = Field(
        (),
        repr=False,
        description="API keys, in plain text or as sha256:DIGEST; a request must send one. "
        "Default: no key is needed.",
    )
    operator_keys: tuple[str, ...] = Field(
        (),
        repr=False,
        description="Operators' keys, for the paths that change the engine, such as "
        "/update_weights_from_disk and /sleep; they open all others too. Default: nobody may use "
        "those paths.",
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1, description="The largest body of a request.")
    body_timeout_s: float = Field(
        60.0, gt=0, description="Seconds from a request's headers to the end of its body."
    )
    files: str | None = Field(
        None,
        min_length=1,
        description="Where /v1/files and /v1/batches keep their files: a folder that all nodes "
        "share, or a URL that fsspec knows, such as s3://bucket/path. Default: nowhere, so these "
        "paths are off.",
    )
    max_file_bytes: int = Field(200 * 2**20, ge=1, description="The largest file to upload.")
    cors_origins: tuple[str, ...] = Field(
        (),
        description="Origins that browsers may send requests from, such as "
        "https://chat.example.com, or * for all.",
    )
    allowed_media_domains: tuple[str, ...] = Field(
        (),
        description="Hosts from which the server may fetch the images of requests, such as "
        "images.example.com or 10.0.0.5:9000. A name may lead only to public addresses, or to "
        "addresses that are allowed too. Default: none.",
    )
    ignore_unknown_fields: bool = Field(
        False,
        description="Ignore unknown fields of requests, which gateways may add, instead of "
        "refusing them; an answer's warnings name them. Fields of objects within a request, such "
        "as diffusion, and fields that are known but not supported are still refused.",
    )
    vllm_metric_names: bool = Field(False, description="Show every metric under vLLM's name too.")
    docs: bool = Field(True, description="Serve /docs and /openapi.json.")
    page: bool = Field(
        True, description="Serve a page at / to chat with the model and watch the denoising."
    )

    @field_validator("api_keys", "operator_keys", mode="before")
    @classmethod
    def _digests(cls, given: Any) -> Any:
        """Run before pydantic's checks, whose errors would quote the keys."""
        if not isinstance(given, list | tuple) or not all(isinstance(key, str) for key in given):
            raise ValueError("expected a list of texts")
        return tuple(as_digest(key) for key in given)

    @field_validator("allowed_media_domains")
    @classmethod
    def _hosts(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for host in given:
            if not _HOST.fullmatch(host.lower()):
                raise ValueError(
                    f"{host!r:.99} is not a host; write a name or an address, with a port if it is "
                    "not the usual one"
                )
        return tuple(host.lower() for host in given)

    @field_validator("files")
    @classmethod
    def _a_place(cls, given: str | None) -> str | None:
        """Check the place where the server is started: replicas run in folders of their own."""
        if given is None:
            return None
        from diffray.cluster.api.object_store import ObjectStore  # imports fsspec

        place = given if "://" in given else str(Path(given).absolute())
        ObjectStore(place)
        return place

    def refuse_keys_beside(self, api_key_env: str | None, operator_key_env: str | None) -> None:
        if self.api_keys and api_key_env is not None:
            raise ValueError("give api.api_keys or api_key_env, not both")
        if self.operator_keys and operator_key_env is not None:
            raise ValueError("give api.operator_keys or operator_key_env, not both")

    def with_keys_of(
        self,
        api_key_env: str | None,
        operator_key_env: str | None,
        environment: Mapping[str, str],
    ) -> Self:
        """Return these settings, with the keys of the environment variables that are named."""
        found = self._with_keys("api_keys", "api_key_env", api_key_env, environment)
        return found._with_keys("operator_keys", "operator_key_env", operator_key_env, environment)

    def _with_keys(
        self, field: str, option: str, variable: str | None, environment: Mapping[str, str]
    ) -> Self:
        if variable is None:
            return self
        text = environment.get(variable, "")
        keys = tuple(key.strip() for key in text.split(",") if key.strip())
        if not keys:
            raise ValueError(f"{option}: the variable {variable} holds no key; set it")
        try:
            return self.model_validate(dict(self) | {field: keys})
        except ValidationError as error:
            raise ValueError(f"{option} ({variable}): {explain(error)}") from None


def key_digest(key: str) -> str:
    """Return a key's digest, which a configuration may contain instead of the key."""
    return _MARK + sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def as_digest(given: str) -> str:
    """Return the digest of a configured key or digest. Errors never quote a key."""
    if _DIGEST.fullmatch(given):
        return given
    if given.startswith(_MARK):
        raise ValueError(f"a digest is {_MARK} and 64 hexadecimal digits in lower case")
    if not _KEY.fullmatch(given):
        raise ValueError("a key is 1 to 512 printable ASCII characters without spaces")
    return key_digest(given)


def is_known(key: str, digests: Iterable[str]) -> bool:
    """Return whether a key is one of these, in constant time."""
    shown = key_digest(key)
    return any([hmac.compare_digest(shown, digest) for digest in digests])


log = logging.getLogger(__name__)

# Our name -> generation_config.json's
_READ: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
_NOT_HONOURED: Final = {"no_repeat_ngram_size": 0}  # it needs blocks of one position


if TYPE_CHECKING:
    _Defaults = Config
else:
    _FIELDS = not_given(SamplingParams, _READ, " Default: the checkpoint's, else {default}.")
    _TOKENS = " Default: the checkpoint's, else 16 for completions and up to 512 for chats."
    _FIELDS |= not_given(SamplingParams, ["max_tokens"], _TOKENS)
    _Defaults = create_model("_Defaults", __base__=Config, **_FIELDS)


class GenerationDefaults(_Defaults):
    """Defaults of a server; a request's own values come first."""

    if TYPE_CHECKING:
        max_tokens: int | None
        temperature: float | None
        top_k: int | None

        def __init__(self, **given: float | None) -> None: ...

    def over(self, other: Self) -> Self:
        """Return these defaults, with missing ones taken from `other`."""
        return other.model_copy(update=self.model_dump(exclude_none=True))


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Return the defaults in a checkpoint's generation_config.json, if it has one."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return GenerationDefaults()
    found = read_json(file)
    for name, neutral in _NOT_HONOURED.items():
        if found.get(name, neutral) not in (neutral, None):
            log.warning("%s: %s is not supported, so it has no effect", file, name)
    given = {ours: found[theirs] for ours, theirs in _READ.items() if theirs in found}
    if found.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return GenerationDefaults.model_validate(given)
    except ValidationError as error:
        reason = explain(error, _READ)
        raise ValueError(f"{file}: {reason}; correct it or remove it") from None
