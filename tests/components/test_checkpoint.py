"""Loading: every layout and dtype, only this rank's share, and one clear error for each defect."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffray.components.backend import choose_device, choose_dtype
from diffray.components.checkpoints.checkpoint import fill, load_model, names_in
from diffray.components.checkpoints.folder import CheckpointError, read_config, resolve
from diffray.components.checkpoints.info import describe
from diffray.components.checkpoints.special_tokens import special_ids
from diffray.components.checkpoints.weights import WeightFile, open_weights
from diffray.components.layers import Index
from diffray.components.mesh import Mesh
from diffray.components.models.registry import choose_build
from diffray.components.policy import DiffusionParams, Policy
from tests.helpers.paths import GOLDEN
from tests.helpers.tiny_checkpoints import (
    A2D,
    LLADA,
    LLADA2_MOE,
    LLADA_MOE,
    SDAR,
    SDAR_MOE,
    assert_same,
    join_experts,
    parameters,
    random_weights,
    save,
)

NORM = "model.transformer.ln_f.weight"


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return save(tmp_path / "model", LLADA, random_weights(LLADA))


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("config", [LLADA_MOE, LLADA2_MOE, SDAR_MOE])
def test_experts_of_all_layouts_load(config: dict[str, Any], merged: bool, tmp_path: Path) -> None:
    weights = random_weights(config)
    single = save(tmp_path / "single", config, weights)
    joined = save(tmp_path / "joined", config, join_experts(weights, 8, merged))
    assert_same(parameters(single), parameters(joined))
    for expert_parallel in (False, True):
        mesh = Mesh(1, 2, expert_parallel)
        half = load_model(single, dtype="float64", device="cpu", mesh=mesh).state_dict()
        other = load_model(joined, dtype="float64", device="cpu", mesh=mesh).state_dict()
        assert_same(half, other)


def test_pickled_weights_load_alike_in_one_file_or_several(dense: Path, tmp_path: Path) -> None:
    weights = load_file(dense / "model.safetensors")
    one, many = tmp_path / "one", tmp_path / "many"
    for folder in (one, many):
        folder.mkdir()
        shutil.copy(dense / "config.json", folder)
    torch.save(weights, one / "pytorch_model.bin")
    names = list(weights)
    halves = {"pytorch_model-1.bin": names[:9], "pytorch_model-2.bin": names[9:]}
    for file, mine in halves.items():
        torch.save({name: weights[name] for name in mine}, many / file)
    index = {"weight_map": {name: file for file, mine in halves.items() for name in mine}}
    (many / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for folder in (one, many):
        assert_same(parameters(folder), parameters(dense))


class CountingFile:
    def __init__(self, file: WeightFile) -> None:
        self.file, self.path, self.tensors = file, file.path, file.tensors
        self.num_read = 0

    def read(self, name: str, index: Index) -> Tensor:
        part = self.file.read(name, index)
        assert isinstance(part, Tensor)
        self.num_read += part.numel()
        return part


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_rank_reads_its_share_and_no_more(expert_parallel: bool) -> None:
    path = GOLDEN / "llada2_moe"
    mesh = Mesh(1, 4, expert_parallel)
    config = read_config(path)
    model = choose_build(config)(config, mesh, torch.float32)
    model.allocate(torch.device("cpu"))
    files = [CountingFile(file) for file in open_weights(path)]
    fill(model.parts(names_in(files)), files, False)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert sum(file.num_read for file in files) <= held  # one head norm serves several heads


def test_a_tied_head_and_computed_buffers_may_be_absent_or_present(tmp_path: Path) -> None:
    config = LLADA | {"weight_tying": True}
    weights = random_weights(config)
    without = parameters(save(tmp_path / "without", config, weights))
    weights["model.transformer.ff_out.weight"] = weights["model.transformer.wte.weight"].clone()
    weights["model.transformer.blocks.0.rotary_emb.inv_freq"] = torch.ones(4)
    assert_same(parameters(save(tmp_path / "with", config, weights)), without)


def test_only_an_optional_bias_may_be_absent_and_is_zero(tmp_path: Path) -> None:
    weights = random_weights(LLADA2_MOE)
    weights = {name: t for name, t in weights.items() if not name.endswith("expert_bias")}
    optional = LLADA2_MOE | {"moe_router_enable_expert_bias": False}
    model = load_model(save(tmp_path / "a", optional, weights), device="cpu")
    biases = [t for name, t in model.state_dict().items() if name.endswith("bias_E")]
    assert biases and all(not bias.any() for bias in biases)
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\.mlp\.gate\.expert_b"):
        load_model(save(tmp_path / "b", LLADA2_MOE, weights), device="cpu")


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_weights_become_the_dtype_that_is_asked_for(name: str, dense: Path) -> None:
    model = load_model(dense, dtype=name, device="cpu")
    assert {str(t.dtype) for t in model.state_dict().values()} == {f"torch.{name}"}


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), "float32"), (1e6, "float16")])
def test_nan_and_infinite_weights_are_refused(value: float, dtype: str, tmp_path: Path) -> None:
    weights = random_weights(LLADA)
    weights[NORM][3] = value
    path = save(tmp_path / "model", LLADA, weights)
    with pytest.raises(CheckpointError, match=rf"{NORM} in .* is NaN or infinite in {dtype}"):
        load_model(path, dtype=dtype, device="cpu")
    if math.isfinite(value):
        load_model(path, dtype="float32", device="cpu")


def test_unknown_dtypes_and_devices_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"dtype is 'fp8'.*float32, float64, bfloat16, float16"):
        choose_dtype("fp8", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"device is 'gpu'.*cpu"):
        choose_device("gpu")
    assert choose_dtype("auto", torch.device("cpu")) in (torch.float32, torch.bfloat16)


BLOCKS = "model.transformer.blocks."
ADDED = "model.transformer.wpe.weight"


@pytest.mark.parametrize(
    ("gone", "added", "said"),
    [
        (NORM, {}, rf"1 missing: {NORM}"),
        (BLOCKS, {}, r"18 missing: .* and 13 more"),
        ("", {ADDED: torch.ones(2)}, rf"1 unexpected: {ADDED}"),
        ("", {NORM: torch.ones(31)}, rf"{NORM} is \[31\], not \[32\]"),
        ("", {NORM: torch.ones(32, dtype=torch.uint8)}, rf"dtype.*{NORM} is U8"),
        ("", {NORM: torch.ones(32).to(torch.float8_e4m3fn)}, rf"dtype.*{NORM} is F8_E4M3"),
    ],
)
def test_tensors_are_known(gone: str, added: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    weights = random_weights(LLADA)
    weights = {n: t for n, t in weights.items() if not gone or not n.startswith(gone)} | added
    with pytest.raises(CheckpointError, match=said):
        load_model(save(tmp_path / "model", LLADA, weights), device="cpu")


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def rename(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")


def index(folder: Path, weight_map: dict[str, str]) -> None:
    rename(folder)
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def repeat_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({NORM: weights[NORM]}, folder / "second.safetensors")
    index(folder, dict.fromkeys(weights, "part.safetensors") | {NORM: "second.safetensors"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, r"model\.safetensors is truncated.*download it again"),
        (lambda f: (f / "model.safetensors").unlink(), r"no weights; looked for model\.safeten"),
        (rename, r"found part\.safetensors, but no index"),
        (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
        (lambda f: index(f, {NORM: "gone.safetensors"}), "there: gone.safetensors"),
        (lambda f: index(f, {"x": "part.safetensors"}), r"lists tensors .*: x;"),
        (lambda f: index(f, {}), r"has no 'weight_map'"),
        (repeat_a_tensor, rf"1 in two files: {NORM}"),
    ],
)
def test_a_damaged_folder_is_named(damage: Callable[[Path], None], said: str, dense: Path) -> None:
    damage(dense)
    with pytest.raises(ValueError, match=said):
        load_model(dense, device="cpu")


def test_a_name_without_a_folder_is_looked_up_on_the_hub_and_the_error_says_so(dense: Path) -> None:
    assert resolve(dense) == resolve(str(dense)) == dense
    with pytest.raises(CheckpointError, match=r"Hub cannot be reached; .* HF_HOME") as caught:
        resolve("nobody/no-such-model")
    assert "\n" not in str(caught.value) and ". " not in str(caught.value)
    with pytest.raises(CheckpointError, match="is a file; give the checkpoint's folder"):
        resolve(dense / "config.json")


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        (GatedRepoError, 403, "'a/b' needs its owner's permission; ask for it at https://hugg"),
        (RepositoryNotFoundError, 404, "the Hugging Face Hub shows no 'a/b'; give a checkpoint's"),
        (HfHubHTTPError, 500, r"'a/b' could not be downloaded \(HfHubHTTPError: no\)"),
    ],
)
def test_a_hub_id_that_cannot_be_downloaded_says_why(
    kind: type[HfHubHTTPError], status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **more: object) -> None:
        request = httpx2.Request("GET", "https://huggingface.co")
        raise kind("no\nTry again.", response=httpx2.Response(status, request=request))

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=f"^{words}"):
        resolve("a/b")


def test_special_ids_come_from_the_files_that_tell_them(tmp_path: Path) -> None:
    assert special_ids(tmp_path, LLADA) == (62, (63,))
    assert special_ids(tmp_path, LLADA, mask_token_id=1, eos_token_id=[2, 3]) == (1, (2, 3))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [60, 61]}')
    tokens = [{"id": 59, "content": "<|MASK|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert special_ids(tmp_path, {}) == (59, (60, 61))
    tokens = [{"id": 58, "content": "<|mask|>"}, {"id": 57, "content": "<|end|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert special_ids(tmp_path, {}) == (58, (60, 61))
    assert special_ids(tmp_path, {"eos_token_id": 63}) == (58, (63, 60, 61))
    assert special_ids(tmp_path, {"eos_token_id": [61, 63]}) == (58, (61, 63, 60))
    (tmp_path / "generation_config.json").unlink()
    named = {"mask_token": {"content": "<mask>"}, "eos_token": "<|end|>"}
    named["added_tokens_decoder"] = {"9": {"content": "<mask>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert special_ids(tmp_path, {}) == (9, (57,))
    tokens[0]["content"] = "|<MASK>|"  # Fast-dLLM v2's
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (tmp_path / "tokenizer_config.json").unlink()
    assert special_ids(tmp_path, {"eos_token_id": 63}) == (58, (63,))


def test_an_unknown_special_id_is_asked_for_by_its_argument(tmp_path: Path) -> None:
    for config, words in (
        (LLADA_MOE, r"the mask token; pass mask_token_id=\.\.\."),
        ({"mask_token_id": 5}, r"the eos token; pass eos_token_id=\.\.\."),
        ({"mask_token_id": 5, "eos_token_id": [4, 5]}, "not an end token"),
        ({"mask_token_id": 5, "eos_token_id": "x"}, "eos_token_id is 'x'"),
    ):
        with pytest.raises(CheckpointError, match=words):
            special_ids(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "name", "family"),
    [
        (LLADA2_MOE, "models--inclusionAI--LLaDA2.1-mini/snapshots/0a1b", "LLaDA2.1"),
        (LLADA2_MOE, "LLaDA2.0-mini", "LLaDA2"),
        (LLADA, "llada-1.5", "LLaDA-1.5"),
        (LLADA, "TraDo-and-LLaDA2.1", "LLaDA"),
        (SDAR, "Gen-Verse/TraDo-4B-Instruct", "TraDo"),
        (A2D, "Qwen3-0.6B-diffusion-mdlm-v0.1", "A2D"),
        (A2D, "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1", "BD3LM"),
    ],
)
def test_names_tell_members(tmp_path: Path, config: dict[str, Any], name: str, family: str) -> None:
    """Their configs do not identify them. One name changes the default policy."""
    folder = save(tmp_path / name, config, random_weights(config))
    found, plain = describe(folder), load_model(folder, device="cpu", dtype="float32").spec
    assert found.family == plain.family == family
    assert found.diffusion == Policy.resolve(DiffusionParams(), plain).options()
    recommended = found.policies["recommended"]
    assert (recommended != found.diffusion) == (family in ("LLaDA2.1", "A2D", "BD3LM"))
    iterations = {"A2D": "blockwise", "BD3LM": "block_diffusion"}
    assert plain.iterations[0] == iterations.get(family, plain.iterations[0])
    advised = Policy.resolve(DiffusionParams.model_validate(recommended), plain)
    assert advised.decoder.kind == recommended["decoder"]["kind"]


def test_facts_come_from_headers_alone(tmp_path: Path) -> None:
    info = describe(GOLDEN / "llada2_moe")
    assert (info.family, info.layout, info.block_causal) == ("LLaDA2", "single experts", True)
    stored = [t for file in open_weights(info.path) for t in file.tensors.values()]
    assert info.parameters == sum(t.numel for t in stored)
    routed = 2 * 16 * 3 * 32 * 64  # layers, experts, matrices
    assert info.parameters_active == info.parameters - routed * 12 // 16
    assert info.kv_bytes_per_position["bfloat16"] == 3 * 2 * 2 * 16 * 2
    assert info.tensor_parallel == (1, 2, 4) and info.mask_token_id is None
    assert (info.diffusion["block_length"], info.diffusion["cache"]) == (32, {"kind": "exact"})
    assert info.diffusion["decoder"] == {"kind": "threshold", "threshold": 0.9}
    sdar = describe(GOLDEN / "sdar")
    own = {"block_length": 4, "decoder": {"kind": "threshold", "threshold": 0.95}}
    assert sdar.diffusion == info.diffusion | own == sdar.policies["recommended"]
    assert sdar.policies["exact"] == ["exact", "none"]
    assert describe(GOLDEN / "llada_moe_fused").layout == "fused experts"
    dense = describe(GOLDEN / "llada")
    assert (dense.layout, dense.experts, dense.expert_parallel) == ("dense", 0, ())
    assert dense.parameters == dense.parameters_active
    assert (dense.mask_token_id, dense.eos_token_ids) == (510, (511,))
