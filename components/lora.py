"""A LoRA adapter as requests and processes name it, and what its adapter_config.json says.

Without torch: the coordinator passes adapters on.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"

# What changes the arithmetic in ways that are not built, and the value that does not.
_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
}


class LoRA(NamedTuple):
    """An adapter that was loaded; `number` counts the loads, as its files may have changed."""

    name: str
    path: str
    number: int

    def salted(self, cache_salt: str) -> str:
        """Return a salt of its own: with other adapters the same tokens have other K/V."""
        return f"{cache_salt}\0{self.number}\0{self.name}"


class PeftConfig:
    """The adapter_config.json of a PEFT adapter."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._config, self._path = config, path
        if (kind := config.get("peft_type")) != "LORA":
            raise ValueError(f"{path / CONFIG}: peft_type is {kind!r}; only LORA is supported")
        for field, allowed in _ONLY.items():
            if config.get(field) not in allowed:
                raise ValueError(
                    f"{path / CONFIG}: {field} is {config[field]!r}, which is not supported; "
                    f"train the adapter with {allowed[0]!r}"
                )
        for field in ("r", "lora_alpha"):
            given = config.get(field)
            if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
                raise ValueError(
                    f"{path / CONFIG}: {field} is {given!r}; expected a number above 0"
                )

    def rank(self, module: str) -> int:
        return int(self._of("rank_pattern", module, self._config["r"]))

    def scale(self, module: str) -> float:
        """Return what the product of a module's two matrices is multiplied with."""
        alpha = self._of("alpha_pattern", module, self._config["lora_alpha"])
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _of(self, field: str, module: str, default: float) -> float:
        """Return a module's own value, where a pattern names it."""
        own = self._config.get(field) or {}
        fits = (value for key, value in own.items() if re.fullmatch(rf"(.*\.)?({key})", module))
        return float(next(fits, default))
