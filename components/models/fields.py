"""Typed access to a checkpoint's config.json, where every complaint names the key."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from diffray.kernels.rope_scaling import Rope

Config = Mapping[str, object]

REQUIRED: Final = object()
# Beyond these a config is wrong, and building its model would take hours or all memory.
_MOST: Final = 2**22
_MOST_OF: Final = {
    "head_dim": 2**12,
    "mlp_ratio": 2**8,
    "n_heads": 2**10,
    "n_layers": 2**10,
    "num_attention_heads": 2**10,
    "num_experts": 2**12,
    "num_hidden_layers": 2**10,
    "num_shared_experts": 2**8,
}
_MOST_EXPERTS: Final = 2**17  # of all layers together
_LARGEST: Final = 1e30


class Fields:
    """The keys of one config; null counts as absent, as the published configs write it."""

    def __init__(self, config: Config, family: str) -> None:
        self.config = config
        self.family = family

    def count(self, key: str, default: object = REQUIRED) -> int:
        """Return a whole number of at least 1."""
        most = _MOST_OF.get(key, _MOST)
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a whole number of at least 1")
        if value > most:
            raise self._wrong(key, value, f"at most {most}")
        return value

    def optional_count(self, key: str) -> int | None:
        """Return a whole number of at least 1, or None where the key is absent, null or 0."""
        return self.count(key) if self.config.get(key) not in (None, 0) else None

    def number(self, key: str, default: object = REQUIRED) -> float:
        """Return a number above 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number above 0")
        if not 0 < value < _LARGEST:
            raise self._wrong(key, value, f"a number above 0 and below {_LARGEST:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return a number above 0, or None where the key is absent, null or 0."""
        return self.number(key) if self.config.get(key) not in (None, 0) else None

    def flag(self, key: str, default: object = REQUIRED) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def counts(self, key: str) -> list[int] | None:
        """Return a list of whole numbers, or None where the key is absent."""
        value = self._value(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(key, value, "a list of whole numbers")
        return value

    def only(self, key: str, *allowed: object) -> None:
        """Refuse a key that changes the mathematics, unless absent, null or one of `allowed`."""
        value = self.config.get(key)
        if value is not None and not any(value == item for item in allowed):
            choices = " or ".join(repr(item) for item in allowed)
            expected = f"{choices} (or no such key)" if allowed else "null or no such key"
            raise self._wrong(key, value, f"{expected}: nothing else is implemented")

    def must_be(self, key: str, allowed: object) -> None:
        """Require the one implemented value of a key, which is not the upstream default."""
        value = self._value(key, REQUIRED)
        if value != allowed:
            raise self._wrong(key, value, f"{allowed!r}: nothing else is implemented")

    def rope(self, positions: int) -> "Rope":
        """Return the rotation of a model made for `positions`, possibly scaled to more.

        Newer files keep its fields in `rope_parameters`, older ones the scaling in `rope_scaling`.
        """
        from diffray.kernels.rope_scaling import Rope  # it imports torch

        is_new = self.config.get("rope_parameters") is not None
        inner = self.inner("rope_parameters" if is_new else "rope_scaling", {})
        theta = (
            inner.number("rope_theta")
            if inner.config.get("rope_theta") is not None
            else self.number("rope_theta")
        )
        kind = inner.config.get("rope_type", inner.config.get("type")) or "default"
        if kind == "default":
            return Rope(theta, positions)
        if kind not in ("linear", "yarn", "llama3"):
            known = "default, linear, yarn or llama3: nothing else is implemented"
            raise inner._wrong("rope_type", kind, known)
        factor = inner.number("factor")
        if kind == "linear":
            return Rope(theta, int(positions * factor), "linear", factor)
        trained = inner.count("original_max_position_embeddings", positions)
        if kind == "llama3":
            turns = inner.number("high_freq_factor"), inner.number("low_freq_factor")
            return Rope(theta, positions, "llama3", factor, trained, *turns)
        turns = inner.number("beta_fast", 32), inner.number("beta_slow", 1)
        longest = max(positions, int(trained * factor))
        ramp = *turns, inner.flag("truncate", True), inner.yarn_magnitude()
        grown = inner.optional_number("llama_4_scaling_beta") or 0.0
        return Rope(theta, longest, "yarn", factor, trained, *ramp, grown)

    def yarn_magnitude(self) -> float:
        """Return the multiplier of cos and sin, as given or computed from the factor."""
        if self.config.get("attention_factor") is not None:
            return self.number("attention_factor")
        factor, weights = self.number("factor"), ("mscale", "mscale_all_dim")
        if all(self.config.get(key) for key in weights):
            over, under = (_yarn_magnitude(factor, self.number(key)) for key in weights)
            return over / under
        return _yarn_magnitude(factor)

    def head_dim(self, hidden: int, heads: int) -> int:
        """Return the size of a head: its own key, or the hidden size's share."""
        own = self.optional_count("head_dim")
        if own is None and hidden % heads:
            raise ValueError(
                f"config.json of a {self.family} model: the hidden size ({hidden}) is not a "
                f"multiple of the number of heads ({heads}) and there is no 'head_dim'"
            )
        return own or hidden // heads

    def inner(self, key: str, default: object = REQUIRED) -> "Fields":
        """Return the fields of an object inside the config."""
        value = self._value(key, default)
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Fields(value, f"{self.family} {key}")

    def names(self, key: str, default: list[str]) -> list[str]:
        """Return a list of names."""
        value = self._value(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of names")
        return value

    def experts(self, chosen_key: str = "num_experts_per_tok") -> tuple[int, int]:
        """Return how many experts there are, and how many are chosen per token."""
        experts, chosen = self.count("num_experts"), self.count(chosen_key)
        if chosen > experts:
            raise ValueError(
                f"config.json of a {self.family} model: {chosen_key!r} ({chosen}) is more "
                f"than 'num_experts' ({experts})"
            )
        layers = self.config.get("num_hidden_layers")
        if isinstance(layers, int) and layers * experts > _MOST_EXPERTS:
            raise self._wrong("num_experts", experts, f"at most {_MOST_EXPERTS} in all layers")
        return experts, chosen

    def rotated(self, head_dim: int, default: float) -> int:
        """Return how many dimensions of a head are rotated."""
        nested = self.config.get("rope_parameters")
        factor = self.number("partial_rotary_factor", default)
        if isinstance(nested, dict):  # where newer files keep it
            inner = Fields(nested, f"{self.family} rope_parameters")
            factor = inner.number("partial_rotary_factor", factor)
        rotated = int(head_dim * factor)
        said = self.config.get("rotary_dim")
        if said not in (None, rotated):  # the originals do not read it, so it must agree
            expected = f"head_dim * partial_rotary_factor = {rotated} (or no such key)"
            raise self._wrong("rotary_dim", said, expected)
        return rotated

    def _value(self, key: str, default: object) -> object:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ValueError(f"config.json of a {self.family} model lacks the key {key!r}; add it")
        return default

    def _wrong(self, key: str, value: object, expected: str) -> ValueError:
        return ValueError(
            f"config.json of a {self.family} model: {key!r} is {shown(value)}; expected {expected}"
        )


def shown(value: object) -> str:
    """Return a file's value as an error may quote it: in ASCII, and shortened."""
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return by how much YaRN enlarges cos and sin, because attention to more keys is flatter."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
