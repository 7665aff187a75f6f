"""Scaled rotary embeddings equal transformers', and set the maximum length."""

import math
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diffray.components.models.fields import Fields
from diffray.kernels.rope import rope_tables

SIZE, POSITIONS, THETA = 64, 4096, 1e6


LINEAR, YARN = {"rope_type": "linear", "factor": 3.0}, {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
TRAINED = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("given", "longest"),
    [
        (LINEAR, 3 * POSITIONS),
        (YARN, 4 * POSITIONS),
        (YARN | {"factor": 8.0, TRAINED: 1024}, 8 * 1024),
        (YARN | {"factor": 2.0, "beta_fast": 16, "beta_slow": 2}, 2 * POSITIONS),
        (YARN | {"attention_factor": 1.5, "truncate": False}, 4 * POSITIONS),
        (YARN | {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0}, 40 * POSITIONS),
        (LLAMA3 | {TRAINED: 512}, POSITIONS),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_frequencies_are_those_of_transformers(
    given: dict[str, Any], longest: int, key: str
) -> None:
    config = Qwen3Config(
        hidden_size=SIZE,
        num_attention_heads=1,
        head_dim=SIZE,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": THETA, "original_max_position_embeddings": POSITIONS}
        | given,
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, torch.device("cpu"))
    own = {"rope_theta": THETA} if key == "rope_parameters" else {}
    fields = {key: given | own}
    rope = Fields({"rope_theta": THETA, **fields}, "toy").rope(POSITIONS)
    torch.testing.assert_close(rope.frequencies(SIZE, torch.float32), expected, rtol=1e-5, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)
    assert rope.positions == longest
    cos_PR, sin_PR = rope_tables(rope, SIZE, torch.float64)
    assert cos_PR.shape == (longest, SIZE)
    torch.testing.assert_close(
        cos_PR**2 + sin_PR**2, torch.full_like(cos_PR, rope.magnitude**2), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}])
def test_a_model_that_is_not_stretched_turns_as_before(scaling: dict[str, Any] | None) -> None:
    rope = Fields({"rope_theta": THETA, "rope_scaling": scaling}, "toy").rope(POSITIONS)
    assert (rope.positions, rope.magnitude) == (POSITIONS, 1.0)
    slowest = float(rope.frequencies(SIZE, torch.float64)[-1])
    assert slowest == pytest.approx(math.pow(THETA, 2 / SIZE - 1))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "longrope"}, "'rope_type' is 'longrope'; expected default"),
        ({"rope_type": "yarn"}, "lacks the key 'factor'"),
        (YARN | {"factor": 0}, "'factor' is 0"),
        ({"rope_type": "llama3", "factor": 8.0}, "high_freq_factor"),
    ],
)
def test_what_is_not_implemented_is_one_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fields({"rope_theta": THETA, "rope_scaling": given}, "toy").rope(POSITIONS)
