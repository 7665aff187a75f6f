"""The option `quantization`: which weights are kept in which format. Without torch."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from diffray.components.spelling import did_you_mean
from diffray.kernels.formats import FORMATS, Format

# The parts of a model that can be quantized; routers, norms and biases never are, and embeddings
# only in checkpoints.
PARTS: Final = ("experts", "attention", "mlp", "head")
USUAL: Final = PARTS[:3]  # what a single format covers: a head's errors affect every confidence
PATTERN: Final = "re:"
NONE: Final = "none"
_PRESETS: Final = {"experts_int8": {"experts": "int8"}, "experts_fp8": {"experts": "fp8"}}

Given = str | Mapping[str, str]


class Rule(NamedTuple):
    """A part or a pattern, and the format of its matrices; None leaves them unchanged."""

    key: str
    form: Format | None
    asked: bool = True  # whether the user named it, so that some matrix must match

    def is_about(self, part: str, module: str) -> bool:
        if self.key.startswith(PATTERN):
            return re.match(self.key.removeprefix(PATTERN), module) is not None
        return self.key == part


class Scheme(NamedTuple):
    """The formats of a model's weights. The first rule that matches a matrix decides.

    For a quantized checkpoint, `stored` has the formats of its modules, by name.
    """

    given: str
    rules: tuple[Rule, ...] = ()
    stored: Mapping[str, Format] | None = None

    def rule_for(self, part: str, module: str) -> Rule | None:
        """Return the rule for a matrix of a part, under its module's name in the checkpoint."""
        if self.stored is not None and part in (*PARTS, "embedding"):
            return Rule(module, self.stored[module]) if module in self.stored else None
        if part not in PARTS:
            return None
        return next((rule for rule in self.rules if rule.is_about(part, module)), None)

    @property
    def kinds(self) -> set[str]:
        forms = [rule.form for rule in self.rules] + [*(self.stored or {}).values()]
        return {form.kind for form in forms if form is not None}


def parse_quantization(given: Given) -> Scheme:
    """Read the option; refuse unknown parts and formats."""
    shown = repr(given if isinstance(given, str) else dict(given))
    mapping = _as_mapping(given)
    if mapping is None:
        form = _format(str(given), shown)
        experts = form if form is None else form.for_experts
        named = {"experts": experts, "attention": form, "mlp": form}
        return Scheme(shown, tuple(Rule(part, named[part], asked=False) for part in USUAL))
    rules = [Rule(_key(key, shown), _format(name, shown)) for key, name in mapping.items()]
    if not rules:
        raise ValueError(f"quantization is {shown}; name a format, or leave it out")
    for rule in rules:
        if rule.key == "experts" and rule.form is not None and rule.form != rule.form.for_experts:
            raise ValueError(
                "quantization: experts cannot have quantized activations with integer weights; "
                f"choose {rule.form.for_experts.name} for experts"
            )
    return Scheme(shown, tuple(sorted(rules, key=lambda rule: not rule.key.startswith(PATTERN))))


def _as_mapping(given: Given) -> Mapping[str, str] | None:
    """Return a mapping from parts to formats, or None for a single format."""
    if not isinstance(given, str):
        return given
    if given in _PRESETS:
        return _PRESETS[given]
    if "=" not in given:
        return None
    pairs = [pair.rpartition("=") for pair in given.split(",")]
    return {key.strip(): name.strip() for key, _, name in pairs}


def _key(key: str, shown: str) -> str:
    if not key.startswith(PATTERN):
        if key not in PARTS:
            near = did_you_mean(key, PARTS)
            raise ValueError(
                f"quantization is {shown}: there is no part {key!r}{near or '.'} Allowed: "
                f"{', '.join(PARTS)}, or {PATTERN} and a regular expression for modules' names"
            )
        return key
    try:
        re.compile(key.removeprefix(PATTERN))
    except re.error as error:
        raise ValueError(
            f"quantization is {shown}: {key!r} is not a regular expression ({error})"
        ) from None
    return key


def _format(name: str, shown: str) -> Format | None:
    if name == NONE:
        return None
    if name not in FORMATS:
        near = did_you_mean(name, FORMATS)
        raise ValueError(
            f"quantization is {shown}: there is no format {name!r}{near or '.'} "
            "Allowed: int8, uint8, int4 or uint4 (with a group size if wanted, as in int4_g128), "
            f"fp8, w8a8, w8a8_fp8, q8_0, q4_0, q4_1 or {NONE}, or a mapping from parts to formats"
        )
    return FORMATS[name]
