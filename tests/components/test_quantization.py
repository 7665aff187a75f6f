"""Routed experts kept in a byte a weight: near the model, a quarter of its memory, or refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffray import DiffusionLLM, SamplingParams
from diffray.components.backend import QUANTIZED
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.denoiser import Denoiser
from diffray.components.experts import Experts
from diffray.components.mesh import Mesh
from tests.helpers.paths import GOLDEN
from tests.helpers.threads import over_ranks
from tests.helpers.tiny_checkpoints import IDS, full_forward

KINDS = list(QUANTIZED)
SPARSE = ["llada_moe", "llada_moe_fused", "llada2_moe", "sdar_moe"]


def load(path: Path, quantization: str | None, mesh: Mesh | None = None) -> Denoiser:
    return load_model(
        path, dtype="float64", device="cpu", mesh=mesh, progress=False, quantization=quantization
    )


def experts_of(model: Denoiser) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPARSE)
def test_logits_are_those_of_the_rounded_weights(name: str, kind: str) -> None:
    """As if the experts had been rounded in the checkpoint, and not far from what they were."""
    plain, quantized = load(GOLDEN / name, None), load(GOLDEN / name, kind)
    found = full_forward(quantized, IDS)
    before = full_forward(plain, IDS)
    for ours, theirs in zip(experts_of(plain), experts_of(quantized), strict=True):
        for w, values, scale in (
            (ours.w13_EFH, theirs.w13_EFH, theirs.scale13_EF),
            (ours.w2_EHI, theirs.w2_EHI, theirs.scale2_EH),
        ):
            assert scale is not None
            w.copy_(values.float() * scale.unsqueeze(2))
    torch.testing.assert_close(found, full_forward(plain, IDS), rtol=0, atol=1e-9)
    error = ((found - before).norm() / before.norm()).item()
    assert 0 < error < 0.05


def test_the_experts_take_a_byte_a_weight() -> None:
    model = load(GOLDEN / "llada_moe", "experts_int8")
    assert {w.dtype for e in experts_of(model) for w in (e.w13_EFH, e.w2_EHI)} == {torch.int8}
    assert model.dtype == torch.float64


def test_experts_dealt_out_over_ranks_compute_the_same() -> None:
    def work(mesh: Mesh) -> list[Tensor]:
        return [full_forward(load(GOLDEN / "llada_moe", "experts_int8", mesh), IDS)]

    (alone,) = work(Mesh())
    ranks, _ = over_ranks(2, True, work)
    together = torch.cat([logits for (logits,) in ranks], dim=-1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_demo_model_says_the_same(kind: str) -> None:
    """To a question of the kind it knows: to others its best tokens are close, and may change."""
    question = "Maya has 5 cards. Adam has 12 times as many. How many cards do they have together?"
    said = []
    for quantization in (None, kind):
        with DiffusionLLM("demo", dtype="float32", quantization=quantization, device="cpu") as llm:
            (found,) = llm.chat([{"role": "user", "content": question}], SamplingParams())
        said.append(found.outputs[0].text)
    assert said[0].endswith("65.")
    assert said[1] == said[0]


def test_a_model_without_experts_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"'experts_int8', but .*llada has no experts"):
        load(GOLDEN / "llada", "experts_int8")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'int4'; expected one of experts_int8, experts_fp8"):
        load(GOLDEN / "llada_moe", "int4")
