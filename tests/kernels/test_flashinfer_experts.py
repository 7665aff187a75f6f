"""FlashInfer's experts as a variant, with a stand-in for its call, which needs a GPU.

The stand-in checks what FlashInfer 0.7.2 checks of its arguments, and computes what it documents.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.helpers.triton_device import DEVICE  # isort: skip
from diffray.kernels import flashinfer_experts
from diffray.kernels.trial import Call, attempt
from diffray.kernels.triton.experts import EXPERTS, EXPERTS_ADD_NORM
from diffray.kernels.variants import Choices, Run, chosen

TOKENS, NUM, CHOSEN, HIDDEN, WIDTH = 12, 5, 2, 48, 32


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor],
    *,
    output: Tensor,
    use_fused_finalize: bool,
) -> Tensor:
    assert input.is_contiguous() and input.dtype == output_dtype == fc1_expert_weights.dtype
    assert token_selected_experts.dtype == torch.int32
    assert token_final_scales.dtype == torch.float32
    assert not quant_scales and not use_fused_finalize
    summed = torch.zeros(input.shape, device=input.device)
    for expert, (first, second) in enumerate(
        zip(fc1_expert_weights, fc2_expert_weights, strict=True)
    ):
        up, gate = (input.float() @ first.float().T).chunk(2, dim=-1)
        found = (silu(gate) * up) @ second.float().T
        chosen = token_selected_experts == expert
        summed += found * (token_final_scales * chosen).sum(1, keepdim=True)
    return output.copy_(summed)


def install(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    stand_in = SimpleNamespace(cutlass_fused_moe=run)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(fused_moe=stand_in))
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", stand_in)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, cutlass_fused_moe)
    monkeypatch.setattr(flashinfer_experts, "installed_version", lambda: "0.7.2")


def case() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of a rank whose experts are not all of those that tokens choose."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN)
    w31 = torch.randn(NUM, 2 * WIDTH, HIDDEN) / HIDDEN**0.5
    w2 = torch.randn(NUM, HIDDEN, WIDTH) / WIDTH**0.5
    ids = torch.rand(TOKENS, NUM + 4).topk(CHOSEN).indices - 2
    numbers = (part.to(DEVICE, torch.bfloat16) for part in (x, w31, w2, torch.rand(TOKENS, CHOSEN)))
    x, w31, w2, weights = numbers
    return x, w31, w2, ids.to(DEVICE), weights


def calls() -> list[Call]:
    x, w31, w2, ids, weights = case()
    added = torch.randn(2, TOKENS, HIDDEN, device=DEVICE).bfloat16()
    norm = torch.randn(HIDDEN, device=DEVICE).bfloat16()
    rest = None, added[0], added[1], norm, 1e-5
    return [
        Call(EXPERTS, (x, w31, w2, ids, weights, None), {}),
        Call(EXPERTS_ADD_NORM, (x, w31, None, w2, None, ids, weights, *rest), {}),
    ]


def swapped(*args: Any, **options: Any) -> Tensor:
    """Take gate for up."""
    up, gate = args[3].chunk(2, dim=1)
    changed = *args[:3], torch.cat([gate, up], dim=1), *args[4:]
    return cutlass_fused_moe(*changed, **options)


@pytest.mark.parametrize("call", calls(), ids=lambda call: call.kernel.name)
def test_a_trial_finds_it_right_and_it_runs_where_it_is_chosen(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = next(each for each in call.variants if each.name == "flashinfer")
    assert attempt([call], variant, lambda _: 1e-3, None).refused == ""
    run = chosen(call.kernel, Choices({(call.kernel.name, call.shape): "flashinfer"}))
    got, expected = (f(*call.args) for f in (run, variant.run))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    install(monkeypatch, swapped)
    assert attempt([call], variant, lambda _: 1e-3, None).refused.startswith("wrong: error ")


def test_it_is_no_variant_without_its_kernels_or_for_other_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w31, w2, ids, weights = case()
    assert flashinfer_experts.can_run(x, w31, w2)
    assert not flashinfer_experts.can_run(x.float(), w31.float(), w2.float())
    assert not flashinfer_experts.can_run(x, w31.to(torch.float8_e4m3fn), w2)
    assert not flashinfer_experts.can_run(x, w31, w2[..., :28])
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", SimpleNamespace())
    none = flashinfer_experts.experts_forward(x[:0], w31, w2, ids[:0], weights[:0])
    assert none.shape == (0, HIDDEN)  # without a call
    monkeypatch.setattr(flashinfer_experts, "installed_version", lambda: "")
    assert not flashinfer_experts.can_run(x, w31, w2)
