"""A LoRA adapter as requests and processes name it, and what its adapter_config.json says.

Without torch, because the coordinator passes adapters on.
"""

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"

_MOST: Final = 1e6
# Fields that change the arithmetic in unsupported ways, and the values that do not.
_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),  # a router over adapters
    "use_qalora": (False, None),
    # Other values change the base model's weights.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}


class LoRA(NamedTuple):
    """A loaded adapter; each load has a new `number`, because files may change.

    K/V belong to one load.
    """

    name: str
    path: str
    number: int

    @staticmethod
    def loaded_now(name: str, path: str) -> "LoRA":
        return LoRA(name, path, time.time_ns())


class PeftConfig:
    """The adapter_config.json of a PEFT adapter."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._config, self._path = config, path
        if (kind := config.get("peft_type")) != "LORA":
            raise ValueError(f"{path / CONFIG}: peft_type is {kind!r}; only LORA is supported")
        for field, allowed in _ONLY.items():
            if config.get(field) not in allowed:
                raise ValueError(
                    f"{path / CONFIG}: {field} is {config[field]!r:.99}, which is not supported; "
                    f"train the adapter with {allowed[0]!r}"
                )
        for field in ("r", "lora_alpha"):
            self._check(field, config.get(field))
        for field in ("rank_pattern", "alpha_pattern"):
            own = config.get(field) or {}
            if not isinstance(own, dict):
                raise ValueError(f"{path / CONFIG}: {field} is {own!r:.99}; expected an object")
            for key, given in own.items():
                self._check(f"{field} of {key!r:.99}", given)
                try:
                    re.compile(key)
                except re.error as error:
                    raise ValueError(f"{path / CONFIG}: {field}: {key!r:.99}: {error}") from None

    def _check(self, what: str, given: object) -> None:
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < _MOST:
            raise ValueError(
                f"{self._path / CONFIG}: {what} is {given!r:.99}; expected a number above 0"
            )

    def rank(self, module: str) -> int:
        return int(self._of("rank_pattern", module, self._config["r"]))

    def scale(self, module: str) -> float:
        """Return the factor of the product of a module's two matrices."""
        alpha = self._of("alpha_pattern", module, self._config["lora_alpha"])
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def wants(self, module: str) -> bool:
        """Return whether the adapter was trained on a module, as PEFT reads target_modules."""
        if self._config.get("layers_to_transform") is not None:
            return False  # it covers only some layers, by PEFT's own numbering
        targeted, excluded = (
            self._names(field, module) for field in ("target_modules", "exclude_modules")
        )
        return targeted and not excluded

    def _names(self, field: str, module: str) -> bool:
        """Return whether a field, a list of suffixes or an expression, matches a module."""
        given = self._config.get(field) or []
        if isinstance(given, list):
            return any(f".{module}".endswith(f".{ending}") for ending in given)
        try:
            return re.fullmatch(given, module) is not None
        except (re.error, TypeError) as error:
            raise ValueError(f"{self._path / CONFIG}: {field}: {given!r:.99}: {error}") from None

    def _of(self, field: str, module: str, default: float) -> float:
        """Return the module's own value if a pattern matches it, else the default."""
        own = self._config.get(field) or {}
        fits = (value for key, value in own.items() if re.fullmatch(rf"(.*\.)?({key})", module))
        return float(next(fits, default))
