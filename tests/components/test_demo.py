"""The models in the box: as small as promised, and as good as their metrics say."""

import json
from pathlib import Path
from typing import Any

import pytest

from diffray import DiffusionLLM
from diffray.components.checkpoints.demos import DEMOS, demo_path
from diffray.components.checkpoints.info import describe
from examples.train_demo.evaluate import caches_of, run
from examples.train_demo.tasks import drawn

SAMPLE = 63  # nine of each task


def folder(name: str) -> Path:
    found = demo_path(name)
    assert found is not None
    return found


def metrics(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder(name) / "metrics.json").read_text())
    return loaded


@pytest.mark.parametrize("name", DEMOS)
def test_it_is_small_2_and_4_ranks_can_share_it_and_any_text_comes_back(name: str) -> None:
    assert (folder(name) / "model.safetensors").stat().st_size <= 12e6
    info = describe(folder(name))
    assert {2, 4} <= {*info.tensor_parallel} & {*info.expert_parallel}
    with DiffusionLLM(name) as llm:
        assert llm.tokenizer is not None
        odd = "\u00e9\u20ac\U0001f600 <|mask|> 2048"
        for text in ("12*12=144", "def f(x):\n    return x", odd):
            assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMOS)
@pytest.mark.rotate(1)
def test_a_sample_confirms_the_metrics(name: str) -> None:
    """Other held-out items than those of metrics.json; four standard errors are allowed."""
    promised = metrics(name)
    items = drawn("entities", SAMPLE, seed=99)
    with DiffusionLLM(name, dtype="float32") as llm:
        found = run(llm, items, int(promised["max_tokens"]))
    share = promised["exact_match"]
    error = 4 * max(share * (1 - share), 0.01) ** 0.5 / SAMPLE**0.5
    assert abs(found["exact_match"] - share) <= error
    ratio = found["tokens_per_forward"] / promised["tokens_per_forward"]
    assert 0.8 <= ratio <= 1.25


@pytest.mark.long
@pytest.mark.parametrize("name", DEMOS)
@pytest.mark.parametrize(
    "options",
    [{"quantization": "int8"}, {"quantization": "w8a8"}, {"kv_cache_dtype": "int8"}],
    ids=["int8 weights", "w8a8", "int8 K/V"],
)
def test_eight_bits_cost_three_answers_of_sixty_at_most(name: str, options: dict[str, Any]) -> None:
    """Beside the same model in float32, whatever that one knows."""
    items, most = drawn("entities", SAMPLE, seed=99), int(metrics(name)["max_tokens"])
    shares = []
    wishes: list[dict[str, Any]] = [{}, options]
    for wish in wishes:
        with DiffusionLLM(name, dtype="float32", **wish) as llm:
            cache = caches_of(folder(name))[1]  # by which K/V are read that were stored before
            shares.append(run(llm, items, most, cache)["exact_match"])
    assert shares[1] > shares[0] - 3.5 / SAMPLE
