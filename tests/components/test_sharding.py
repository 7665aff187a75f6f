"""A model cut over ranks is the same model: ranks are threads, and their sums are real."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.mesh import Mesh
from tests.helpers.paths import GOLDEN
from tests.helpers.threads import over_ranks
from tests.helpers.tiny_checkpoints import IDS, LLADA, LLADA_MOE, full_forward, random_weights, save

CAUSAL = ["llada2_moe", "fast_dllm_v2", "sdar", "sdar_moe", "ar_llama", "nemotron_labs_diffusion"]
DENSE = ["llada", "dream", "fast_dllm_v2", "sdar", "ar_llama", "nemotron_labs_diffusion"]
DENSE += ["a2d_qwen3"]
SPARSE = ["llada_moe", "llada_moe_fused", "llada2_moe", "sdar_moe"]


def results(path: Path, block: int, mesh: Mesh) -> list[Tensor]:
    model = load_model(path, dtype="float64", device="cpu", mesh=mesh)
    logits = full_forward(model, IDS, block)
    start = model.spec.vocab_start
    soft = torch.linspace(0, 1, model.spec.vocab_size, dtype=torch.float64)
    with torch.inference_mode():
        mixed = model.expected_embedding(soft[start : start + logits.shape[1]].unsqueeze(0))
    return [logits, mixed, torch.tensor(sum(p.numel() for p in model.parameters()))]


def assert_together_equal_one(path: Path, block: int, size: int, *, expert_parallel: bool) -> int:
    whole = results(path, block, Mesh())
    ranks, num_sums = over_ranks(size, expert_parallel, partial(results, path, block))
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks], dim=1), whole[0])
    for rank in ranks:
        torch.testing.assert_close(rank[1], whole[1])
        assert rank[2] < 0.7 * whole[2]
    return num_sums


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "expert_parallel"),
    [*((name, False) for name in DENSE), *((name, ep) for name in SPARSE for ep in (False, True))],
)
def test_ranks_together_equal_one(name: str, size: int, expert_parallel: bool) -> None:
    block = 4 if name in CAUSAL else 0
    path = GOLDEN / name
    num_sums = assert_together_equal_one(path, block, size, expert_parallel=expert_parallel)
    layers = load_model(path, device="cpu").spec.num_layers
    assert num_sums == 2 * layers + 2  # one for each half of a layer, and two for embeddings


SHARED_AND_DENSE = LLADA_MOE | {
    "moe_layer_freq": [0, 1],
    "dense_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "moe_router_enable_expert_bias": True,
}


@pytest.mark.parametrize(
    ("config", "expert_parallel"),
    [
        (LLADA | {"n_heads": 8, "n_kv_heads": 2}, False),  # key heads are replicated
        (LLADA | {"vocab_size": 63}, False),  # cut unevenly
        (SHARED_AND_DENSE, False),
        (SHARED_AND_DENSE, True),
    ],
    ids=["few key heads", "odd vocabulary", "shared expert", "shared expert, by experts"],
)
def test_four_equal_one(config: dict[str, Any], expert_parallel: bool, tmp_path: Path) -> None:
    path = save(tmp_path, config, random_weights(config))
    assert assert_together_equal_one(path, 0, 4, expert_parallel=expert_parallel) == 6


HIDDEN_96 = LLADA_MOE | {"hidden_size": 96, "num_attention_heads": 12}
KEY_HEADS_4 = LLADA | {"d_model": 96, "n_heads": 12, "n_kv_heads": 4}
UNEVEN = [  # the number of ranks, what they cannot share, and the numbers that are possible
    (LLADA | {"n_heads": 8}, 6, "the number of attention heads (8)", "1, 2, 4, 8"),
    (KEY_HEADS_4, 6, "the number of key/value heads (4)", "1, 2, 4, 12"),
    (LLADA | {"mlp_hidden_size": 47}, 2, "the intermediate size (47)", "1"),
    (HIDDEN_96, 3, "the experts' intermediate size (16)", "1, 2, 4"),
    (LLADA | {"n_heads": 16, "vocab_size": 7}, 16, "the vocabulary size (7)", "1, 2, 4"),
]
SENTENCE = "{} cannot be divided over {} ranks; this model runs on {} ranks"
SIX = SENTENCE.format("the experts (6)", 4, "1, 2") + " with expert_parallel"
NO_EXPERTS = "no experts to distribute; leave expert_parallel out"


@pytest.mark.parametrize(
    ("config", "mesh", "said"),
    [
        *((config, Mesh(0, n), SENTENCE.format(what, n, ok)) for config, n, what, ok in UNEVEN),
        (LLADA_MOE | {"num_experts": 6}, Mesh(0, 4, True), SIX),
        (LLADA, Mesh(0, 2, True), NO_EXPERTS),
    ],
)
def test_misfits_are_refused(config: dict[str, Any], mesh: Mesh, said: str, tmp_path: Path) -> None:
    """The folder has no weights at all."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{re.escape(said)}$"):
        load_model(tmp_path, device="cpu", mesh=mesh)
