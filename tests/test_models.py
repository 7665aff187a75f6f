"""The models against the original systems' logits, against a plain oracle, and cut over ranks."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffray.components.checkpoint import load_model
from diffray.components.mesh import Mesh
from diffray.components.models.registry import choose_build
from tests import plain_models
from tests.tiny_checkpoints import (
    GOLDEN,
    LLADA,
    LLADA2_MOE,
    LLADA_MOE,
    full_forward,
    random_weights,
    save,
)

NAMES = ["llada", "llada_moe", "llada_moe_fused", "llada2_moe"]
IDS = [5, 9, 33, 62, 62, 1, 17, 62, 40, 2, 62, 62]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_original_systems(name: str, dtype: str) -> None:
    case = json.loads((GOLDEN / name.removesuffix("_fused") / "golden.json").read_text())
    golden = case["full_forward"]
    model = load_model(GOLDEN / name, dtype=dtype, device="cpu")
    logits = full_forward(model, golden["input_ids"], golden.get("block_length", 0))
    expected = torch.tensor(golden["logits"], dtype=logits.dtype)
    # The original dense model normalises and rotates in float32 even where its weights are
    # float64, and this checkpoint amplifies that rounding to 6e-4 on a scale of 17.
    tolerance = 1e-3 if name == "llada" else 1e-4
    torch.testing.assert_close(logits[golden["positions"]], expected, atol=tolerance, rtol=0)


def llada2(w: dict[str, Tensor], c: dict[str, Any], ids: Tensor) -> Tensor:
    return plain_models.llada2_moe(w, c, ids, 4)


@pytest.mark.parametrize(
    ("base", "changes", "oracle"),
    [
        (LLADA, {}, plain_models.llada),
        (LLADA, {"n_kv_heads": 2}, plain_models.llada),
        (LLADA, {"n_kv_heads": None, "multi_query_attention": True}, plain_models.llada),
        (LLADA, {"weight_tying": True}, plain_models.llada),
        (LLADA, {"embedding_size": 80}, plain_models.llada),
        (LLADA, {"mlp_hidden_size": None, "mlp_ratio": 2}, plain_models.llada),
        (LLADA_MOE, {}, plain_models.llada_moe),
        (LLADA_MOE, {"qk_layernorm": False}, plain_models.llada_moe),
        (LLADA_MOE, {"num_key_value_heads": 1}, plain_models.llada_moe),
        (LLADA_MOE, {"partial_rotary_factor": 0.5}, plain_models.llada_moe),
        (LLADA_MOE, {"shared_expert_intermediate_size": 24}, plain_models.llada_moe),
        (LLADA_MOE, {"moe_router_enable_expert_bias": True}, plain_models.llada_moe),
        (LLADA_MOE, {"tie_word_embeddings": True}, plain_models.llada_moe),
        (
            LLADA_MOE,
            {"moe_layer_freq": [0, 1], "dense_intermediate_size": 40},
            plain_models.llada_moe,
        ),
        (LLADA2_MOE, {}, llada2),
        (LLADA2_MOE, {"model_type": "llada2_moe_veomni"}, llada2),
        (LLADA2_MOE, {"first_k_dense_replace": 0, "num_shared_experts": 2}, llada2),
        (LLADA2_MOE, {"num_shared_experts": None, "topk_group": 4}, llada2),
        (LLADA2_MOE, {"partial_rotary_factor": 1.0, "head_dim": 16}, llada2),
        (LLADA2_MOE, {"rope_parameters": {"rope_theta": 3e6, "rope_type": "default"}}, llada2),
    ],
)
def test_config_variants_equal_the_plain_oracle(
    base: dict[str, Any],
    changes: dict[str, Any],
    oracle: Callable[[dict[str, Tensor], dict[str, Any], Tensor], Tensor],
    tmp_path: Path,
) -> None:
    config = base | changes
    weights = random_weights(config)
    model = load_model(save(tmp_path, config, weights), dtype="float64", device="cpu")
    logits = full_forward(model, IDS, 4 if model.spec.block_causal else 0)
    expected = oracle(weights, config | {"n_kv_heads": None}, torch.tensor(IDS))
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)


@dataclass(frozen=True, slots=True)
class ThreadMesh(Mesh):
    """Ranks that are threads of this process: real sums, counted."""

    barrier: threading.Barrier | None = None
    shared: tuple[list[Tensor], ...] = ()

    def all_reduce(self, x: Tensor) -> Tensor:
        assert self.barrier is not None
        self.shared[self.rank].append(x.clone())
        self.barrier.wait()
        turn = len(self.shared[self.rank]) - 1
        total = torch.stack([sums[turn] for sums in self.shared]).sum(0)
        self.barrier.wait()
        return x.copy_(total)


def over_ranks(
    size: int, expert_parallel: bool, work: Callable[[Mesh], list[Tensor]]
) -> tuple[list[list[Tensor]], int]:
    """Run `work` as every rank at once; return the ranks' results and how often they met."""
    barrier = threading.Barrier(size, timeout=60)
    shared: tuple[list[Tensor], ...] = tuple([] for _ in range(size))
    meshes = [
        ThreadMesh(rank, size, expert_parallel, None, barrier, shared) for rank in range(size)
    ]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, meshes)), len(shared[0])


def results(path: Path, block: int, mesh: Mesh) -> list[Tensor]:
    """Return the logits, a soft embedding and the sizes of what this rank holds."""
    model = load_model(path, dtype="float64", device="cpu", mesh=mesh)
    logits = full_forward(model, IDS, block)
    start = model.spec.vocab_start
    soft = torch.linspace(0, 1, model.spec.vocab_size, dtype=torch.float64)
    with torch.inference_mode():
        mixed = model.expected_embedding(soft[start : start + logits.shape[1]].unsqueeze(0))
    return [logits, mixed, torch.tensor(sum(p.numel() for p in model.parameters()))]


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_together_equal_one(name: str, size: int, expert_parallel: bool) -> None:
    block = 4 if name == "llada2_moe" else 0
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
    ("base", "size", "said"),
    [
        (LLADA | {"vocab_size": 63}, 2, "vocabulary"),
        (LLADA | {"n_heads": 2}, 4, "attention heads"),
        (LLADA | {"mlp_hidden_size": 47}, 2, "intermediate size"),
        (LLADA_MOE, 3, "experts' intermediate size"),
    ],
)
def test_a_size_that_does_not_divide_is_refused(base: dict[str, Any], size: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}.*cannot be divided over {size} ranks"):
        choose_build(base)(base, Mesh(0, size), torch.float32)


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (LLADA, "alibi", True),
        (LLADA, "activation_type", "swiglu"),
        (LLADA, "activation_type", None),
        (LLADA, "block_type", "sequential"),
        (LLADA, "clip_qkv", 8.0),
        (LLADA, "scale_logits", True),
        (LLADA, "rope", False),
        (LLADA, "layer_norm_type", "default"),
        (LLADA, "attention_layer_norm", True),
        (LLADA, "include_bias", True),
        (LLADA, "include_qkv_bias", True),
        (LLADA, "block_group_size", 2),
        (LLADA, "rope_scaling", {"type": "linear", "factor": 2.0}),
        (LLADA, "rope_theta", None),
        (LLADA, "weight_tying", "no"),
        (LLADA_MOE, "hidden_act", "gelu"),
        (LLADA_MOE, "attention_bias", True),
        (LLADA_MOE, "moe_router_score_function", "sigmoid"),
        (LLADA_MOE, "routed_scaling_factor", 2.5),
        (LLADA_MOE, "router_num_group", 8),
        (LLADA_MOE, "num_experts", -1),
        (LLADA_MOE, "num_experts_per_tok", 9),
        (LLADA_MOE, "moe_layer_freq", [1, 1, 1]),
        (LLADA_MOE, "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        (LLADA2_MOE, "use_bias", True),
        (LLADA2_MOE, "use_bias", None),
        (LLADA2_MOE, "use_qkv_bias", True),
        (LLADA2_MOE, "norm_topk_prob", False),
        (LLADA2_MOE, "score_function", "softmax"),
        (LLADA2_MOE, "n_group", 3),
        (LLADA2_MOE, "topk_group", 5),
        (LLADA2_MOE, "num_nextn_predict_layers", 1),
    ],
)
def test_a_config_that_needs_other_arithmetic_is_refused(
    base: dict[str, Any], key: str, value: object
) -> None:
    config = base | {key: value}
    with pytest.raises(ValueError, match=rf"config\.json of a LLaDA.*{key}"):
        choose_build(config)(config, Mesh(), torch.float32)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLADA | {"d_model": 33}, r"hidden size \(33\)"),
        (LLADA | {"n_kv_heads": 3}, r"key/value heads \(3\)"),
        (LLADA | {"d_model": 36}, "9 of 9 dimensions"),
        (LLADA_MOE | {"moe_layer_freq": [0, 1]}, "lacks the key 'dense_intermediate_size'"),
        (LLADA2_MOE | {"topk_group": 1, "num_experts_per_tok": 4}, "4 experts of 8"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choose_build(config)(config, Mesh(), torch.float32)


def test_the_class_is_chosen_by_architecture_then_by_keys() -> None:
    for config in (LLADA, LLADA_MOE, LLADA2_MOE):
        bare = {key: value for key, value in config.items() if key != "architectures"}
        assert choose_build(bare) is choose_build(config)
    assert choose_build(LLADA) is not choose_build(LLADA_MOE)


def test_an_unknown_architecture_is_named_with_what_is_supported() -> None:
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*LLaDAModelLM, LLaDAMoEModelLM"):
        choose_build({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
