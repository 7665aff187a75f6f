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
from diffray.components.models.registry import build_model, rank_counts
from tests.helpers.paths import GOLDEN
from tests.helpers.threads import over_ranks
from tests.helpers.tiny_checkpoints import (
    IDS,
    LLADA,
    LLADA_MOE,
    full_forward,
    random_weights,
    save,
)

CAUSAL = ["llada2_moe", "fast_dllm_v2", "sdar", "sdar_moe"]
DENSE = ["llada", "dream", "fast_dllm_v2", "sdar"]
SPARSE = ["llada_moe", "llada_moe_fused", "llada2_moe", "sdar_moe"]


def results(path: Path, block: int, mesh: Mesh) -> list[Tensor]:
    """Return the logits, a soft embedding and the sizes of what this rank holds."""
    model = load_model(path, dtype="float64", device="cpu", mesh=mesh)
    logits = full_forward(model, IDS, block)
    start = model.spec.vocab_start
    soft = torch.linspace(0, 1, model.spec.vocab_size, dtype=torch.float64)
    with torch.inference_mode():
        mixed = model.expected_embedding(soft[start : start + logits.shape[1]].unsqueeze(0))
    return [logits, mixed, torch.tensor(sum(p.numel() for p in model.parameters()))]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "expert_parallel"),
    [*((name, False) for name in DENSE), *((name, ep) for name in SPARSE for ep in (False, True))],
)
def test_ranks_together_equal_one(name: str, size: int, expert_parallel: bool) -> None:
    block = 4 if name in CAUSAL else 0
    whole = results(GOLDEN / name, block, Mesh())
    work = partial(results, GOLDEN / name, block)
    ranks, num_sums = over_ranks(size, expert_parallel, work)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks], dim=1), whole[0])
    for rank in ranks:
        torch.testing.assert_close(rank[1], whole[1])
        assert rank[2] < 0.7 * whole[2]
    layers = load_model(GOLDEN / name, device="cpu").spec.num_layers
    assert num_sums == 2 * layers + 2  # one for each half of a layer, and two for embeddings


def test_key_heads_are_replicated_where_ranks_outnumber_them(tmp_path: Path) -> None:
    config = LLADA | {"n_heads": 8, "n_kv_heads": 2}
    path = save(tmp_path, config, random_weights(config))
    ranks, _ = over_ranks(4, False, partial(results, path, 0))
    whole = results(path, 0, Mesh())
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks], dim=1), whole[0])


def test_a_vocabulary_that_does_not_divide_is_cut_unevenly(tmp_path: Path) -> None:
    config = LLADA | {"vocab_size": 63}
    path = save(tmp_path, config, random_weights(config))
    ranks, _ = over_ranks(4, False, partial(results, path, 0))
    whole = results(path, 0, Mesh())
    assert [rank[0].shape[1] for rank in ranks] == [15, 16, 16, 16]
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks], dim=1), whole[0])
    for rank in ranks:
        torch.testing.assert_close(rank[1], whole[1])


def test_shared_expert_and_dense_layers_are_cut(tmp_path: Path) -> None:
    config = LLADA_MOE | {
        "moe_layer_freq": [0, 1],
        "dense_intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
        "moe_router_enable_expert_bias": True,
    }
    path = save(tmp_path, config, random_weights(config))
    whole = results(path, 0, Mesh())
    for expert_parallel in (False, True):
        ranks, num_sums = over_ranks(4, expert_parallel, partial(results, path, 0))
        torch.testing.assert_close(torch.cat([rank[0] for rank in ranks], dim=1), whole[0])
        assert num_sums == 2 * 2 + 2


@pytest.mark.parametrize(
    ("base", "size", "said", "possible"),
    [
        (LLADA | {"n_heads": 8}, 6, "the number of attention heads (8)", "1, 2, 4, 8"),
        (
            LLADA | {"d_model": 96, "n_heads": 12, "n_kv_heads": 4},
            6,
            "the number of key/value heads (4)",
            "1, 2, 4, 12",
        ),
        (LLADA | {"mlp_hidden_size": 47}, 2, "the intermediate size (47)", "1"),
        (
            LLADA_MOE | {"hidden_size": 96, "num_attention_heads": 12},
            3,
            "the experts' intermediate size (16)",
            "1, 2, 4",
        ),
        (LLADA | {"n_heads": 16, "vocab_size": 7}, 16, "the vocabulary size (7)", "1, 2, 4"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_read(
    base: dict[str, Any], size: int, said: str, possible: str, tmp_path: Path
) -> None:
    """The folder has no weights at all."""
    (tmp_path / "config.json").write_text(json.dumps(base))
    sentence = f"{said} cannot be divided over {size} ranks; this model runs on {possible} ranks"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        load_model(tmp_path, device="cpu", mesh=Mesh(0, size))


def test_experts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLADA_MOE | {"num_experts": 6}))
    sentence = r"the experts \(6\) .* 4 ranks; this model runs on 1, 2 ranks with expert_parallel$"
    with pytest.raises(ValueError, match=sentence):
        load_model(tmp_path, device="cpu", mesh=Mesh(0, 4, True))
    (tmp_path / "config.json").write_text(json.dumps(LLADA))
    with pytest.raises(ValueError, match="no experts to distribute; leave expert_parallel out"):
        load_model(tmp_path, device="cpu", mesh=Mesh(0, 2, True))


@pytest.mark.parametrize("base", [LLADA, LLADA_MOE])
def test_every_size_that_is_called_possible_is(base: dict[str, Any]) -> None:
    config = base | {"vocab_size": 61}
    for expert_parallel in {False, "num_experts" in base}:
        assert rank_counts(config, expert_parallel=expert_parallel) == (1, 2, 4)
        for size in (1, 2, 4):
            for rank in range(size):
                build_model(config, Mesh(rank, size, expert_parallel), torch.float32)
