"""The formats in a checkpoint's `quantization_config`; anything unsupported is refused."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from diffray.components.checkpoints.folder import CheckpointError
from diffray.components.models.fields import shown
from diffray.kernels.formats import FORMATS, Format

_LAYOUTS: Final = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
)


class Group(NamedTuple):
    """A config group of compressed-tensors."""

    targets: tuple[str, ...]
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None

    def names(self, module: str) -> bool:
        """Whether a target is this module, or a pattern that matches its name."""
        return any(
            re.match(target.removeprefix("re:"), module)
            if target.startswith("re:")
            else target == module
            for target in self.targets
        )

    @property
    def names_linear(self) -> bool:
        return "Linear" in self.targets

    def format(self, *, packed: bool, expert: bool) -> Format:
        """Return the format of a matrix; `packed` ones are stored in int32 words."""
        weights = self.weights
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        symmetric = weights.get("symmetric", True) is True
        # Activations in another type than the weights are not rounded.
        rounded = self.inputs is not None and self.inputs.get("type", "int") == kind
        if kind == "float" and bits == 8 and symmetric and not packed:
            name = "w8a8_fp8" if rounded else "fp8"
        elif kind == "int" and bits == 8 and symmetric and not packed:
            name = "w8a8" if rounded else "int8"
        elif kind == "int" and bits in (4, 8) and packed and not rounded:
            name = f"int{bits}" if symmetric else f"uint{bits}"
        else:
            sign = "symmetric" if symmetric else "asymmetric"
            where = "words" if packed else "bytes"
            raise refused(f"weights of {shown(bits)} bits, {sign}, of type {kind!r} in {where}")
        form = format_of(name, weights.get("strategy"), weights.get("group_size"))
        return form.for_experts if expert else form


def groups_of(config: Mapping[str, Any]) -> list[Group]:
    """Read the config groups of compressed-tensors; refuse those that need other arithmetic."""
    if config.get("format") not in _LAYOUTS:
        raise refused(f"the format {shown(config.get('format'))}")
    for key in ("kv_cache_scheme", "transform_config"):
        if config.get(key):
            raise refused(f"a {key}")
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise refused("a sparsity_config")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refused("no config_groups")
    return [_group(each) for each in groups.values()]


def _group(given: object) -> Group:
    if not isinstance(given, dict) or not isinstance(given.get("weights"), dict):
        raise refused("a config group without weights")
    if given.get("output_activations"):
        raise refused("rounded outputs")
    weights, inputs = given["weights"], given.get("input_activations")
    if weights.get("dynamic") or weights.get("actorder") not in (None, False, "weight", "static"):
        raise refused("reordered columns or dynamic weights")
    if inputs is not None:
        exact = isinstance(inputs, dict) and inputs.get("num_bits") == 8
        if not exact or inputs.get("dynamic") is not True or inputs.get("symmetric") is False:
            raise refused("activations that are not quantized dynamically to 8 bits")
        if inputs.get("strategy") != "token":
            raise refused("activations without one scale for each token")
    targets = given.get("targets")
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise refused("a config group without a list of targets")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except re.error:
            raise refused(f"the target {shown(target)}") from None
    return Group(tuple(targets), weights, inputs)


def gptq_format(config: Mapping[str, Any]) -> tuple[Format, int]:
    """Read GPTQ's fields; return the format, and what is added to stored zero points."""
    bits, group = config.get("bits"), config.get("group_size")
    if config.get("desc_act") is not False:
        raise refused("desc_act, which reorders columns")
    if bits not in (4, 8) or config.get("dynamic") or config.get("pack_dtype") not in _INT32:
        raise refused(f"GPTQ of {shown(bits)} bits, of several formats, or not in int32")
    if config.get("lm_head"):
        raise refused("a quantized lm_head")
    layout = config.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise refused(f"the checkpoint_format {shown(layout)}")
    sym = config.get("sym", True)
    if not isinstance(sym, bool):
        raise refused(f"the sym {shown(sym)}")
    kind = f"int{bits}" if sym else f"uint{bits}"
    strategy = "channel" if group == -1 else "group"
    return format_of(kind, strategy, group), 1 if layout == "gptq" else 0


_INT32: Final = (None, "int32")


def format_of(kind: str, strategy: object, group: object) -> Format:
    name = kind
    if strategy == "group":
        name = f"{kind}_g{group}"
    elif strategy not in ("channel", "tensor"):
        raise refused(f"scales by {shown(strategy)}")
    if name not in FORMATS:
        raise refused(f"{kind} in groups of {shown(group)}")
    return FORMATS[name]


def refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's 'quantization_config' has {what}, which is not supported; use one "
        "with int4, int8, fp8 or w8a8 weights whose columns are in order, or one that is not "
        "quantized"
    )
