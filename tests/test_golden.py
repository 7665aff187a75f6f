"""Token for token what the original systems generate, on tiny checkpoints in their layouts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diffray import DiffusionLLM, SamplingParams

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = {
    "llada": "llada",
    "llada_moe": "llada_moe",
    "llada_moe_fused": "llada_moe",  # the same weights in another layout
    "llada2_moe": "llada2_moe",
}
NUMBERS = {
    "decoder": ("threshold", "low_threshold", "alpha", "gamma", "decay", "steps", "factor"),
    "cache": ("before", "after", "warmup"),
    "iteration": ("cont_weight", "cont_weight_init", "cont_weight_growth", "threshold_decay"),
}


def cases_of(family: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((GOLDEN / family / "golden.json").read_text())["cases"]
    return cases


def diffusion_of(case: dict[str, Any]) -> dict[str, object]:
    """Say a golden case in our words."""
    kinds = {
        "iteration": case.get("iteration", "blockwise"),
        "decoder": case["decoder"],
        "cache": {"block": "exact"}.get(case["cache"], case["cache"]),
    }
    parts = {
        part: {"kind": kind} | {name: case[name] for name in NUMBERS[part] if name in case}
        for part, kind in kinds.items()
    }
    return {"block_length": case["block_length"], **parts}


@cache
def model(family: str, dtype: str) -> DiffusionLLM:
    return DiffusionLLM(
        str(GOLDEN / family), dtype=dtype, mask_token_id=510, eos_token_id=511, max_num_seqs=64
    )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_originals(family: str, dtype: str) -> None:
    """All cases of a family in one batch, with no more forwards than the originals."""
    compare(model(family, dtype), cases_of(FAMILIES[family]))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_factor_equals_fast_dllm(dtype: str) -> None:
    """The dynamic rule with Fast-dLLM's three caches, as its own code generates."""
    cases = json.loads((GOLDEN / "llada_factor.json").read_text())["cases"]
    compare(model("llada", dtype), cases)


def compare(llm: DiffusionLLM, cases: list[dict[str, Any]]) -> None:
    params = [
        SamplingParams(max_tokens=case["gen_length"], ignore_eos=True, diffusion=diffusion_of(case))
        for case in cases
    ]
    found = llm.generate([case["prompt"] for case in cases], params)
    for case, out in zip(cases, found, strict=True):
        described = {k: v for k, v in case.items() if k not in ("prompt", "tokens")}
        assert out.outputs[0].token_ids == case["tokens"], described
        assert out.forwards <= case.get("forwards", 10**9), described
