"""How each family is best denoised, and which policies compute what the model itself computes.

`diffray info`, /v1/models and docs/models.md show the same advice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Advice:
    """Policies by kind: a cache, or an iteration with the caches that it needs."""

    exact: tuple[str, ...]
    approximate: tuple[str, ...]
    source: str  # of the recommended policy
    # Its differences from the default policy; empty if that is the recommended one.
    recommended: Mapping[str, Any] = field(default_factory=dict)


_WINDOWS: Final = ("prefix", "dual", "vicinity", "soft")
_LLADA: Final = Advice(("none",), _WINDOWS, "Fast-dLLM and dInfer")
_BLOCKS: Final = ("exact", "none"), ("soft", "sub_blocks with sub_block")
_CAUSAL: Final = Advice(("exact", "none"), (), "the one policy")
_SDAR: Final = Advice(
    ("exact", "none"),
    ("soft", "other block lengths"),
    'paper and model cards ("dynamic")',
)
_EDIT: Final = {"kind": "edit", "preset": "quality", "max_post_edit_steps": 16}
_A2D: Final[Mapping[str, Any]] = {
    "decoder": {"kind": "fixed", "steps": 128, "rounding": "half_even"},
    "cache": {"kind": "none"},
    "canvas": "growing",
}
ADVICE: Final = {
    "LLaDA": _LLADA,
    "LLaDA-1.5": _LLADA,
    "LLaDA-MoE": _LLADA,
    "Dream": Advice(("none",), _WINDOWS, "Fast-dLLM"),
    "LLaDA2": Advice(*_BLOCKS, "dInfer"),
    "LLaDA2.1": Advice(*_BLOCKS, "model card", {"decoder": _EDIT}),
    "Fast-dLLM v2": Advice(
        ("sub_blocks with exact", "sub_blocks with none"),
        ("sub_blocks with sub_block", "soft", "block_diffusion"),
        "model card",
    ),
    "Nemotron-Labs-Diffusion": Advice(("exact", "none"), ("other block lengths",), "model card"),
    "SDAR": _SDAR,
    "TraDo": _SDAR,
    "SDAR-MoE": _SDAR,
    "DiffusionGemma": Advice(
        ("renoise with exact", "renoise with none"),
        ("other block lengths",),
        "transformers' defaults, at temperature 1",
    ),
    "A2D": Advice(("none",), (*_WINDOWS, "block_diffusion"), "dllm", _A2D),
    "BD3LM": Advice(
        ("exact", "none"),
        ("blockwise", "other block lengths"),
        "dllm",
        {"decoder": _A2D["decoder"]},
    ),
    "I-DLM": Advice(("exact", "none"), (), "the authors' serving system"),
    "Llama": _CAUSAL,
    "Qwen2": _CAUSAL,
    "Qwen3": _CAUSAL,
}
# Their configs are those of the family, so only the checkpoint's name identifies them.
_NAMED: Final = {"LLaDA": "LLaDA-1.5", "LLaDA2": "LLaDA2.1", "SDAR": "TraDo", "A2D": "BD3LM"}
# The default iterations of those that have another.
FIRST: Final = {"BD3LM": "block_diffusion"}
_UNKNOWN: Final = Advice((), (), "")


def family_of(family: str, path: Path) -> str:
    """Return the member of a family that the name of a checkpoint's folder or its Hub id gives.

    A downloaded checkpoint is in OWNER--NAME/snapshots/COMMIT.
    """
    member = _NAMED.get(family)
    names = path.absolute().parts[-3:]
    found = member is not None and any(member.lower() in name.lower() for name in names)
    return member if found and member is not None else family


def told(family: str, default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the advice about a family with this default policy, in JSON's types."""
    advice = ADVICE.get(family, _UNKNOWN)
    return {
        "recommended": {**default, **advice.recommended},
        "source": advice.source or None,
        "exact": list(advice.exact),
        "approximate": list(advice.approximate),
    }
