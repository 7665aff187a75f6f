"""Token for token what the original systems generate, on tiny checkpoints in their layouts."""

import json
from functools import cache
from typing import Any

import pytest

from benchmarks.golden import EOS, FAMILIES, GOLDEN, MASK, cases_of, diffusion_of
from diffray import DiffusionLLM, SamplingParams


@cache
def model(family: str, dtype: str) -> DiffusionLLM:
    return DiffusionLLM(
        str(GOLDEN / family), dtype=dtype, mask_token_id=MASK, eos_token_id=EOS, max_num_seqs=64
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
