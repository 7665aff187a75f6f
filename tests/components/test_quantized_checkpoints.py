"""Quantized checkpoints: what is written is read back bit for bit, GPTQ's too, the rest refused."""

import json
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from diffray.cluster.cli.main import app
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.checkpoints.convert import convert
from diffray.components.checkpoints.info import describe
from diffray.components.checkpoints.quantize import quantize_checkpoint
from diffray.components.checkpoints.schemes import groups_of
from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.quantization import Given
from diffray.kernels.formats import FORMATS, Format
from diffray.kernels.quantize import dequantize
from tests.helpers.paths import GOLDEN
from tests.helpers.quantized import weights_of
from tests.helpers.threads import over_ranks
from tests.helpers.tiny_checkpoints import (
    IDS,
    LLADA,
    assert_same,
    full_forward,
    random_weights,
    save,
)

WIDE = LLADA | {"d_model": 64, "mlp_hidden_size": 128}  # ranks too have whole groups of 32
GIVEN: list[Given] = [
    *("int8", "uint8", "int4", "uint4", "fp8", "w8a8", "w8a8_fp8"),
    *("int8_g32", "uint8_g32", "int4_g32", "uint4_g32"),
    {"attention": "int8", "mlp": "uint4", "head": "fp8"},
    {"re:.*blocks\\.0\\.": "int8", "mlp": "int4_g32"},
]


def load(
    path: Path, quantization: Given | None = None, mesh: Mesh | None = None, dtype: str = "float32"
) -> Denoiser:
    return load_model(
        path, dtype=dtype, device="cpu", progress=False, quantization=quantization, mesh=mesh
    )


def parameters(
    path: Path, quantization: Given | None = None, mesh: Mesh | None = None
) -> dict[str, Tensor]:
    return load(path, quantization, mesh).state_dict()


def quantization_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("plain") / "llada", WIDE, random_weights(WIDE))


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_loaded_equals_quantized_at_load(tmp_path: Path, plain: Path, given: Given) -> None:
    written = quantize_checkpoint(plain, tmp_path / "small", given, progress=False)
    for mesh in (Mesh(), Mesh(0, 2), Mesh(1, 2)):
        assert_same(parameters(written, None, mesh), parameters(plain, given, mesh))


@pytest.mark.parametrize("name", ["llada_moe", "llada2_moe", "sdar_moe"])
def test_experts_come_back_one_by_one(tmp_path: Path, name: str) -> None:
    given = {"experts": "uint4", "attention": "w8a8"}
    written = quantize_checkpoint(GOLDEN / name, tmp_path / "small", given, progress=False)
    assert_same(parameters(written), parameters(GOLDEN / name, given))
    assert describe(written).experts == describe(GOLDEN / name).experts


@pytest.mark.parametrize(
    ("kind", "number", "layout", "of_experts"),
    [
        ("w8a8", "int", "int-quantized", "int8"),
        ("w8a8_fp8", "float", "float-quantized", "w8a8_fp8"),
    ],
)
def test_rounded_activations_are_stored_as_dynamic_ones_of_each_token(
    tmp_path: Path, kind: str, number: str, layout: str, of_experts: str
) -> None:
    """Experts have no products of whole numbers, and keep their activations."""
    written = quantize_checkpoint(GOLDEN / "llada_moe", tmp_path / "small", kind, progress=False)
    groups = quantization_config(written)["config_groups"].values()
    rounded = [g for g in groups if g["input_activations"]]
    about = {"num_bits": 8, "type": number, "symmetric": True, "strategy": "token", "dynamic": True}
    assert [(g["input_activations"], g["format"]) for g in rounded] == [(about, layout)]
    for model in (load(written), load(GOLDEN / "llada_moe", kind)):
        assert {each.format for each in weights_of(model, "experts")} == {FORMATS[of_experts]}
        assert {each.format for each in weights_of(model, "attention")} == {FORMATS[kind]}
    weights = {"num_bits": 8, "type": number, "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": about}
    (read,) = groups_of({"format": "naive-quantized", "config_groups": {"group_0": group}})
    assert read.format(packed=False, expert=False).name == kind
    assert read.format(packed=False, expert=True).name == of_experts


def test_the_layout_is_that_of_compressed_tensors(tmp_path: Path, plain: Path) -> None:
    """Numbers in words of 32 bits, the first in the lowest; zero points by columns."""
    written = quantize_checkpoint(plain, tmp_path / "small", "uint4_g32", progress=False)
    stored: dict[str, Tensor] = {}
    for file in sorted(written.glob("*.safetensors")):
        stored |= load_file(file)
    module = "model.transformer.blocks.0.ff_out"
    weight = load_file(plain / "model.safetensors")[f"{module}.weight"].float()
    assert stored[f"{module}.weight_shape"].tolist() == [64, 128]
    words = stored[f"{module}.weight_packed"]
    scale = stored[f"{module}.weight_scale"]
    zeros = stored[f"{module}.weight_zero_point"]
    assert (words.dtype, words.shape) == (torch.int32, (64, 16))
    assert (scale.shape, zeros.dtype, zeros.shape) == ((64, 4), torch.int32, (8, 4))
    for row, column in ((0, 0), (5, 37), (63, 127)):
        number = (int(words[row, column // 8]) >> (4 * (column % 8))) & 15
        zero = (int(zeros[row // 8, column // 32]) >> (4 * (row % 8))) & 15
        step = float(scale[row, column // 32])
        assert abs((number - zero) * step - float(weight[row, column])) <= step * 0.5001
    config = quantization_config(written)
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    (group,) = config["config_groups"].values()
    assert group["weights"]["symmetric"] is False and group["weights"]["group_size"] == 32
    assert config["ignore"] == ["model.transformer.ff_out", "model.transformer.wte"]
    assert f"{module}.weight" not in stored and "model.transformer.ff_out.weight" in stored


def pack_columns(numbers_IO: Tensor, bits: int) -> Tensor:
    """Pack numbers below each other into int32 words, the first in the lowest bits."""
    per = 32 // bits
    shifts = torch.arange(0, 32, bits).view(1, per, 1)
    words: Tensor = (numbers_IO.long().unflatten(0, (-1, per)) << shifts).sum(1)
    return words.to(torch.int32)


def as_gptq(
    plain: Path, folder: Path, bits: int, group: int, *, sym: bool, version: str = "gptq"
) -> dict[str, Tensor]:
    """Write a checkpoint as GPTQ's tools do; return its matrices as they mean them."""
    meant, stored = {}, {}
    weights = load_file(plain / "model.safetensors")
    torch.manual_seed(0)
    for name, weight in weights.items():
        if weight.dim() != 2 or "blocks" not in name:
            stored[name] = weight
            continue
        module, (rows, columns) = name.removesuffix(".weight"), weight.shape
        size = columns if group == -1 else group
        count, most = columns // size, (1 << bits) - 1
        numbers = torch.randint(0, most + 1, (columns, rows))
        zeros = torch.randint(1, most + 1, (count, rows))
        if sym:
            zeros[:] = 1 << (bits - 1)
        scales = (torch.rand(count, rows) * 0.02 + 0.01).half()
        index = torch.arange(columns) // size
        meant[name] = ((numbers - zeros[index]) * scales.float()[index]).t()
        less = 1 if version == "gptq" else 0
        stored |= {
            f"{module}.qweight": pack_columns(numbers, bits),
            f"{module}.qzeros": pack_columns((zeros - less).t(), bits).t().contiguous(),
            f"{module}.scales": scales,
            f"{module}.g_idx": index.int(),
        }
    about: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group}
    about |= {"desc_act": False, "sym": sym, "checkpoint_format": version}
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": about}
    save(folder, config, stored)
    return meant


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, -1), (8, 32), (8, -1)])
def test_gptq_means_what_its_tools_mean(
    tmp_path: Path, plain: Path, bits: int, group: int, sym: bool, version: str
) -> None:
    meant = as_gptq(plain, tmp_path / "gptq", bits, group, sym=sym, version=version)
    wide = load_file(plain / "model.safetensors") | {n: w.double() for n, w in meant.items()}
    same = save(tmp_path / "wide", WIDE, {n: w.contiguous() for n, w in wide.items()})
    small, large = (load(path, dtype="float64") for path in (tmp_path / "gptq", same))
    kind = f"{'int' if sym else 'uint'}{bits}"
    assert {w.format for w in weights_of(small, "mlp")} == {Format(kind, max(group, 0))}
    for part in ("attention", "mlp"):
        pairs = zip(weights_of(small, part), weights_of(large, part), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(
                dequantize(ours.kept, torch.float64), theirs.plain.data, rtol=1e-6, atol=1e-9
            )
    alone = full_forward(small, IDS)
    torch.testing.assert_close(alone, full_forward(large, IDS))

    def work(mesh: Mesh) -> Tensor:
        return full_forward(load(tmp_path / "gptq", mesh=mesh, dtype="float64"), IDS)

    if group == -1:  # of two ranks each reads its share
        ranks, _ = over_ranks(2, False, work)
        torch.testing.assert_close(torch.cat(ranks, dim=-1), alone, rtol=0, atol=1e-8)


# The format, changes of the quantization_config, and of its group of compressed-tensors.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("gptq", {"desc_act": True}, {}, "desc_act, which reorders columns"),
    ("gptq", {"bits": 3}, {}, "GPTQ of 3 bits"),
    ("gptq", {"group_size": 48}, {}, "in groups of 48"),
    ("gptq", {"checkpoint_format": "marlin"}, {}, "the checkpoint_format 'marlin'"),
    ("gptq", {"lm_head": True}, {}, "a quantized lm_head"),
    ("gptq", {"group_size": 64}, {}, "scales does not have one number for each row or group"),
    ("gptq", {"quant_method": "awq"}, {}, "method 'awq'; expected compressed-tensors or gptq"),
    ("gptq reordered", {}, {}, "its columns are reordered"),
    ("int4", {"format": "marlin-24"}, {}, "the format 'marlin-24'"),
    ("int4", {"kv_cache_scheme": {"num_bits": 8}}, {}, "a kv_cache_scheme"),
    ("int4", {"config_groups": {}}, {}, "no config_groups"),
    ("int4", {}, {"targets": ["re:nothing"]}, "no config group of the 'quantization_config' mat"),
    ("int4", {}, {"targets": ["re:("]}, "the target 're:('"),
    ("int4", {}, {"weights": {"num_bits": 2, "strategy": "channel"}}, "weights of 2 bits"),
    ("int4", {}, {"weights": {"num_bits": 4, "strategy": "block"}}, "scales by 'block'"),
    ("int4", {}, {"weights": {"num_bits": 4, "actorder": "group"}}, "reordered columns"),
    ("int4", {}, {"input_activations": {"num_bits": 8, "dynamic": False}}, "dynamically to 8 bi"),
]


@pytest.mark.parametrize(("kind", "changes", "in_group", "words"), REFUSED)
def test_what_is_not_implemented_is_refused(
    tmp_path: Path,
    plain: Path,
    kind: str,
    changes: dict[str, Any],
    in_group: dict[str, Any],
    words: str,
) -> None:
    folder = tmp_path / "small"
    if kind == "int4":
        quantize_checkpoint(plain, folder, kind, progress=False)
        group = quantization_config(folder)["config_groups"]["group_0"]
        changes = {"config_groups": {"group_0": group | in_group}} | changes
    else:
        as_gptq(plain, folder, 4, 32, sym=False)
    if kind == "gptq reordered":
        file, name = folder / "model.safetensors", "model.transformer.blocks.0.ff_out.g_idx"
        weights = load_file(file)
        save_file(weights | {name: weights[name].flip(0).contiguous()}, file)
    rewrite(folder, **changes)
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert words in str(caught.value)


def inner(value: dict[str, Any], way: list[str]) -> dict[str, Any]:
    for key in way:
        value = value[key]
    return value


ODD: list[Any] = [None, True, 0, -7, 4.0, 1e300, "", "x", "re:[", [], [None], {}, {"x": [1]}]


@pytest.mark.parametrize("kind", ["gptq", "int4", "w8a8"])
def test_odd_values_are_refused_or_harmless(tmp_path: Path, plain: Path, kind: str) -> None:
    """Whatever a field holds: a model of the same weights, or one sentence."""
    folder = tmp_path / "small"
    if kind == "gptq":
        as_gptq(plain, folder, 4, 32, sym=True)
    else:
        quantize_checkpoint(plain, folder, kind, progress=False)
    expected, about = parameters(folder), quantization_config(folder)
    ways: list[list[str]] = [[], ["config_groups", "group_0"]]
    ways.append([*ways[1], "weights"])
    for way in ways if "config_groups" in about else ways[:1]:
        for key, value in product(inner(about, way), ODD):
            changed = deepcopy(about)
            inner(changed, way)[key] = value
            rewrite(folder, **changed)
            try:
                found = parameters(folder)
            except ValueError:
                continue
            assert_same(found, expected)


def test_what_cannot_be_quantized_is_refused(tmp_path: Path, plain: Path) -> None:
    written = quantize_checkpoint(plain, tmp_path / "small", "int8", progress=False)
    with pytest.raises(ValueError, match="is quantized already; leave it out"):
        parameters(written, "int8")
    with pytest.raises(ValueError, match="quantized already; use the original checkpoint"):
        quantize_checkpoint(written, tmp_path / "smaller", "int4", progress=False)
    with pytest.raises(ValueError, match="convert the checkpoint it was made from"):
        convert(written, tmp_path / "fused", progress=False)
    with pytest.raises(ValueError, match="exists and is not empty"):
        quantize_checkpoint(plain, written, "int4", progress=False)
    with pytest.raises(ValueError, match="the matrices of several experts"):
        quantize_checkpoint(GOLDEN / "llada_moe_fused", tmp_path / "new", "int8", progress=False)
    config = LLADA | {"weight_tying": True}
    tied = save(tmp_path / "tied", config, random_weights(config))
    with pytest.raises(ValueError, match="head is its embedding, which is never quantized"):
        load(tied, {"head": "int8"})


def test_the_command_writes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    target = tmp_path / "small"
    parts = "experts=int4,re:.*layers\\.0\\..*_proj=int8"
    done = CliRunner().invoke(app, ["quantize", "demo", str(target), "-q", parts])
    assert (done.exit_code, done.stdout.strip()) == (0, str(target)), done.stderr
    small, large = describe(target), describe("demo")
    assert small.parameters == large.parameters and small.bytes_on_disk < large.bytes_on_disk
