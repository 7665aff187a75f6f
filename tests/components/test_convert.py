"""Fusing experts: the same model afterwards, all of it or nothing."""

import json
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from diffray.components.checkpoints.convert import convert
from diffray.components.checkpoints.quantize import quantize_checkpoint
from diffray.components.checkpoints.weights import open_weights
from tests.helpers.paths import GOLDEN
from tests.helpers.tiny_checkpoints import (
    LLADA2_MOE,
    LLADA_MOE,
    assert_same,
    join_experts,
    parameters,
    random_weights,
    save,
)


@pytest.mark.parametrize("shard", [5 * 10**9, 100_000])
@pytest.mark.parametrize("name", ["llada_moe", "llada2_moe"])
def test_a_converted_model_is_the_same_model(name: str, shard: int, tmp_path: Path) -> None:
    fused = convert(GOLDEN / name, tmp_path / "out", max_shard_bytes=shard, progress=False)
    assert_same(parameters(fused), parameters(GOLDEN / name))
    for file in open_weights(fused):
        num_bytes = sum(4 * tensor.numel for tensor in file.tensors.values())
        assert num_bytes <= shard or len(file.tensors) == 1


def test_the_result_is_what_the_original_tool_writes(tmp_path: Path) -> None:
    fused = convert(GOLDEN / "llada_moe", tmp_path / "out", progress=False)
    (file,) = fused.glob("*.safetensors")
    original = load_file(GOLDEN / "llada_moe_fused" / "model-00001-of-00001.safetensors")
    assert_same(load_file(file), original)
    config = json.loads((fused / "config.json").read_text())
    assert config == json.loads((GOLDEN / "llada_moe_fused" / "config.json").read_text())


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            convert(GOLDEN / "llada_moe", tmp_path / "out", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_nan_or_infinite_are_not_copied(tmp_path: Path) -> None:
    """Of experts and of what is copied unchanged; quantizing copies the latter too."""
    weights = random_weights(LLADA_MOE)
    expert = next(name for name in weights if "experts.1.up" in name)
    for name, value in ((expert, float("nan")), ("model.norm.weight", float("inf"))):
        spoiled = weights | {name: torch.full_like(weights[name], value)}
        path = save(tmp_path / name, LLADA_MOE, spoiled)
        for write in (convert, partial(quantize_checkpoint, quantization="int8")):
            with pytest.raises(ValueError, match=f"{name} in .* is NaN or infinite"):
                write(path, tmp_path / "out", progress=False)
    assert {file.name for file in tmp_path.iterdir()} == {expert, "model.norm.weight"}


def test_side_files_come_along_and_foreign_code_does_not(tmp_path: Path) -> None:
    """Of merged experts too, whose dtype stays."""
    config: dict[str, Any] = LLADA2_MOE | {"auto_map": {"AutoModel": "modeling_x.X"}}
    weights = {n: t.to(torch.bfloat16) for n, t in random_weights(config).items()}
    path = save(tmp_path / "merged", config, join_experts(weights, 8, merged=True))
    side = {"tokenizer.json", "generation_config.json", "chat_template.jinja"}
    for name in side:
        (path / name).write_text("{}")
    (path / "modeling_x.py").write_text("")
    fused = convert(path, tmp_path / "out", progress=False)
    assert_same(parameters(fused), parameters(path))
    written = {"config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    assert {file.name for file in fused.iterdir()} == side | written
    (file,) = fused.glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    assert "auto_map" not in json.loads((fused / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llada", "has no experts in separate tensors"),
        ("diffusion_gemma", "has no experts in separate tensors"),
        ("llada_moe_fused", "already in the fused layout"),
        ("llada_moe", "exists and is not empty"),
    ],
)
def test_what_needs_no_conversion_is_refused(name: str, said: str, tmp_path: Path) -> None:
    """Nothing is written, and nothing overwritten."""
    out = tmp_path if name == "llada_moe" else tmp_path / "out"
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match=said):
        convert(GOLDEN / name, out, progress=False)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
