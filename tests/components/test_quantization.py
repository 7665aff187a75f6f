"""Quantized models: near the model, in less memory, part by part, on any number of ranks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffray.components.backend import give_back_memory
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.checkpoints.folder import read_config
from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model
from diffray.components.quantization import PARTS, USUAL, Given, parse_quantization
from diffray.components.weight import Weight
from diffray.kernels.choose import TORCH
from diffray.kernels.formats import FORMATS, Format
from diffray.kernels.quantize import Quantized, dequantize
from diffray.kernels.quantized import multiplies_bytes, quantized_linear
from tests.helpers.own_process import in_own_process
from tests.helpers.paths import GOLDEN
from tests.helpers.quantized import weights_of
from tests.helpers.threads import over_ranks
from tests.helpers.tiny_checkpoints import IDS, full_forward
from tests.helpers.updatable_toy import resident_bytes

KINDS = ["int8", "uint8", "int4", "uint4", "fp8"]
MODELS = ["llada", "llada_moe", "llada_moe_fused", "llada2_moe", "sdar", "sdar_moe", "dream"]


def load(
    path: Path, quantization: Given | None, mesh: Mesh | None = None, dtype: str = "float64"
) -> Denoiser:
    return load_model(
        path, dtype=dtype, device="cpu", mesh=mesh, progress=False, quantization=quantization
    )


def on_two_ranks(name: str, given: Given, expert_parallel: bool) -> tuple[Tensor, Tensor]:
    def work(mesh: Mesh) -> Tensor:
        return full_forward(load(GOLDEN / name, given, mesh), IDS)

    ranks, _ = over_ranks(2, expert_parallel, work)
    return torch.cat(ranks, dim=-1), work(Mesh())


def widen(weight: Weight) -> Tensor:
    return dequantize(weight.kept, torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_rounded_weights(name: str, kind: str) -> None:
    """As if all matrices but the head had been rounded in the checkpoint."""
    plain, quantized = load(GOLDEN / name, None), load(GOLDEN / name, kind)
    found = full_forward(quantized, IDS)
    before = full_forward(plain, IDS)
    for part in USUAL:
        pairs = zip(weights_of(plain, part), weights_of(quantized, part), strict=True)
        for ours, theirs in pairs:
            ours.plain.copy_(widen(theirs))
    assert all(each.format is None for each in weights_of(quantized, "head"))
    torch.testing.assert_close(found, full_forward(plain, IDS), rtol=0, atol=1e-8)
    assert not torch.equal(found, before)


@pytest.mark.parametrize("kind", [*KINDS, "w8a8", "w8a8_fp8"])
@pytest.mark.parametrize("name", ["llada", "llada2_moe"])
def test_loading_in_a_format_equals_quantizing_what_was_loaded(name: str, kind: str) -> None:
    after = load(GOLDEN / name, None)
    after.quantize(parse_quantization(kind))
    assert torch.equal(full_forward(load(GOLDEN / name, kind), IDS), full_forward(after, IDS))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_quantized_alone(part: str) -> None:
    model = load(GOLDEN / "llada2_moe", {part: "int8"})
    for other in PARTS:
        formats = {each.format for each in weights_of(model, other)}
        assert formats == {FORMATS["int8"] if other == part else None}
    assert model.dtype == torch.float64


def test_routers_norms_and_embeddings_are_never_quantized() -> None:
    model = load(GOLDEN / "llada2_moe", {"re:.*": "int8"})
    kept = {name for name, tensor in model.named_parameters() if tensor.dtype == torch.float64}
    endings = {name.split(".")[-1] for name in kept}
    assert endings == {"weight", "weight_ND", "weight_EH", "bias_E", "dense"}
    assert [name for name in kept if name.endswith("dense")] == ["embedding.weight.dense"]


def test_a_pattern_goes_before_parts() -> None:
    """Patterns are about the checkpoint's names."""
    given = {"attention": "int8", r"re:.*blocks\.0\..*_proj": "uint8", "re:.*attn_out": "none"}
    model = load(GOLDEN / "llada", given)
    first, second = (layer.attention for layer in model.stack[:2])
    assert first.qkv.weight.format == FORMATS["uint8"]
    assert second.qkv.weight.format == FORMATS["int8"]
    assert first.out.weight.format is None
    formats = {each.format for each in weights_of(model, "mlp")}
    assert formats == {FORMATS["uint8"], None}


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_what_one_does(kind: str, expert_parallel: bool) -> None:
    """A scale belongs to a whole row, of which each rank may hold a part."""
    given = {"experts": kind, "attention": kind, "head": kind}
    together, alone = on_two_ranks("llada_moe", given, expert_parallel)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("kind", "most"), [("w8a8", 0.05), ("w8a8_fp8", 1e-4)])
def test_ranks_with_rounded_activations_are_near(kind: str, most: float) -> None:
    """A rank sees its part of a row of activations, and scales by the largest of that.

    Another power of 2 as the scale of float8 numbers changes only those that are next to none.
    """
    together, alone = on_two_ranks("sdar", kind, False)
    assert 0 < float((together - alone).norm() / alone.norm()) < most


@pytest.mark.skipif(not multiplies_bytes(), reason="this CPU has no unit for bytes")
@pytest.mark.parametrize("size", [1, 2])
def test_packed_bytes_change_no_bit(size: int) -> None:
    """On any number of ranks; and they come back as they were."""
    given = {"attention": "w8a8", "mlp": "w8a8", "head": "w8a8"}

    def work(mesh: Mesh) -> list[Tensor]:
        model = load(GOLDEN / "sdar", given, mesh, "float32")
        matrices = [each for part in given for each in weights_of(model, part)]
        values = [each.kept.values_EOI.clone() for each in matrices]
        found, count = [full_forward(model, IDS)], model.num_weights
        model.pack()
        assert all(each.kept.values_EOI.is_mkldnn for each in matrices)
        assert model.num_weights == count
        found.append(full_forward(model, IDS))
        assert model.unpack()
        for each, before in zip(matrices, values, strict=True):
            assert torch.equal(each.kept.values_EOI, before)
        return found

    ranks, _ = over_ranks(size, False, work)
    for plain, packed in ranks:
        assert torch.equal(plain, packed)


@pytest.mark.slow
@pytest.mark.skipif(not multiplies_bytes(), reason="this CPU has no unit for bytes")
def test_packed_bytes_are_kept_once() -> None:
    """An engine before would make the C library keep what is freed."""
    assert in_own_process(bytes_of_packing) < 0.5  # twice would be 1; oneDNN takes some megabytes


def bytes_of_packing() -> float:
    weight = Weight("mlp", 8192, 4096, dtype=torch.float32)
    weight.dense = torch.nn.Parameter(torch.ones(8192, 4096), requires_grad=False)
    weight.quantize(FORMATS["w8a8"], quantized_linear)
    give_back_memory(0)
    before = resident_bytes()
    weight.pack()
    assert weight.kept.values_EOI.is_mkldnn
    give_back_memory(0)
    return (resident_bytes() - before) / weight.count


@pytest.mark.parametrize(("kind", "share"), [("fp8", 1), ("w8a8_fp8", 1), ("w8a8", 0), ("int4", 0)])
def test_a_model_s_kernels_multiply_with_bytes(kind: str, share: int) -> None:
    """Formats that they do not read have one implementation."""
    seen: list[Format] = []

    def noted(x_TI: Tensor, kept: Quantized, bias_O: Tensor | None) -> Tensor:
        seen.append(kept.format)
        return quantized_linear(x_TI, kept, bias_O)

    config = read_config(GOLDEN / "llada")
    model = build_model(
        config, Mesh(), torch.float32, TORCH._replace(name="noting", quantized_linear=noted)
    )
    model.allocate(torch.device("cpu"))
    for parameter in model.parameters():
        parameter.fill_(0.01)
    model.quantize(parse_quantization({"attention": kind, "mlp": kind, "head": kind}))
    full_forward(model, IDS)
    matrices = 4 * len(model.stack) + 1
    assert seen == [FORMATS[kind]] * matrices * share


def test_a_quantized_head_chooses_the_same() -> None:
    model = load(GOLDEN / "llada", {"head": "int8"})
    hidden = torch.randn(5, model.spec.hidden_size, dtype=torch.float64)
    chosen = model.confidence(hidden, 0, None)
    logits = model.head(hidden)
    torch.testing.assert_close(chosen.logsumexp_R, logits.logsumexp(1))
    assert torch.equal(chosen.ids_R, logits[:, 1:].argmax(1) + 1)


A_RANKS_GROUPS = "a rank's 64 of its 128 columns are not a multiple of 128"
REFUSED: list[tuple[str, Given, str]] = [
    ("llada", "experts_int8", "'experts_int8', but this model has no experts; leave it out"),
    ("llada_moe", {"mlp": "int8"}, "this model has no mlp"),
    ("llada_moe", "int3", "there is no format 'int3', did you mean 'int8'"),
    ("llada_moe", {"expert": "int8"}, "there is no part 'expert', did you mean 'experts'"),
    ("llada_moe", {"re:(": "int8"}, "not a regular expression"),
    ("llada_moe", {"re:.*gate$": "int8"}, "'re:.*gate$' matches no matrix"),
    ("llada_moe", {"experts": "w8a8"}, "choose int8 for experts"),
    ("llada", "w8a8_fp", "there is no format 'w8a8_fp', did you mean 'w8a8_fp8'"),
    ("llada", "int8_g512", "weights are not a multiple of 512; choose another format"),
    ("llada", {"re:.*q_proj": "int8"}, "both are parts of one product; give them one format"),
    ("llada", {"attention": "none"}, "it matches no matrix of this model"),
    ("llada", {}, "name a format"),
    ("llada", {"attention": "int8_g128"}, A_RANKS_GROUPS),
]


@pytest.mark.parametrize(("name", "given", "words"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(name: str, given: Given, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(GOLDEN / name, given, Mesh(0, 2) if words == A_RANKS_GROUPS else None)
    assert words in str(caught.value)
