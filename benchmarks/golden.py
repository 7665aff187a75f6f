"""The golden cases in `tests/golden`: what the original systems generate, said in our words."""

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
MASK, EOS = 510, 511
FAMILIES = {
    "llada": "llada",
    "llada_moe": "llada_moe",
    "llada_moe_fused": "llada_moe",  # the same weights in another layout
    "llada2_moe": "llada2_moe",
}
_NUMBERS = {
    "decoder": (
        "threshold",
        "low_threshold",
        "alpha",
        "gamma",
        "decay",
        "steps",
        "steps_per_block",
        "factor",
    ),
    "cache": ("before", "after", "warmup"),
    "iteration": ("cont_weight", "cont_weight_init", "cont_weight_growth", "threshold_decay"),
}


def golden(family: str) -> dict[str, Any]:
    """Return all that is known of a family."""
    found: dict[str, Any] = json.loads((GOLDEN / family / "golden.json").read_text())
    return found


def cases_of(family: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = golden(family)["cases"]
    return cases


def diffusion_of(case: dict[str, Any]) -> dict[str, object]:
    """Say a golden case in our words."""
    kinds = {
        "iteration": case.get("iteration", "blockwise"),
        "decoder": case["decoder"],
        "cache": {"block": "exact"}.get(case["cache"], case["cache"]),
    }
    parts = {
        part: {"kind": kind} | {name: case[name] for name in _NUMBERS[part] if name in case}
        for part, kind in kinds.items()
    }
    whole = ("block_length", "cfg_scale", "zero_confidence_token_ids")
    return {name: case[name] for name in whole if name in case} | parts
