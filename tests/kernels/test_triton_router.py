"""Routers in Triton against torch, after torch's product and with their own."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import DEVICE  # isort: skip
from tests.helpers.triton_bfloat16 import exact_bfloat16  # isort: skip
from diffray.kernels import router as reference
from diffray.kernels.router import Routing
from diffray.kernels.triton import router
from diffray.kernels.triton.router import grouped_sigmoid_router, softmax_router
from diffray.kernels.triton.router_logits import split_logits


@pytest.fixture(params=[False, True])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few tokens are multiplied by the router, or by torch as many are."""
    multiply = Mock(wraps=split_logits)
    monkeypatch.setattr(router, "split_logits", multiply)
    if not request.param:
        monkeypatch.setattr(router, "_MOST_FUSED", -1)
    yield
    assert multiply.called == request.param


def case(tokens: int, experts: int, hidden: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """States, a router's weights, a bias."""
    torch.manual_seed(experts)
    x, weight = torch.randn(tokens, hidden), torch.randn(experts, hidden) / 4
    return x.to(DEVICE), weight.to(DEVICE), (torch.randn(experts) / 8).to(DEVICE)


def check(got: Routing, expected: Routing, experts: int) -> None:
    assert torch.equal(got.ids_TK, expected.ids_TK)
    torch.testing.assert_close(got.weights_TK, expected.weights_TK)
    starts, order = reference.list_pairs(got.ids_TK, experts)
    assert got.pairs is not None
    assert torch.equal(got.pairs.starts_E, starts) and torch.equal(got.pairs.order_S, order)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 3, 3), (9, 20, 4), (37, 24, 8)])
@pytest.mark.rotate(4)
def test_softmax_router_equals_the_reference(
    tokens: int, experts: int, chosen: int, biased: bool
) -> None:
    x, weight, bias = case(tokens, experts)
    args = x, weight, bias if biased else None, chosen
    check(softmax_router(*args), reference.softmax_router(*args), experts)
    assert softmax_router(x[:0], *args[1:]).ids_TK.shape == (0, chosen)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "groups", "kept"),
    [(7, 32, 4, 8, 4), (3, 12, 3, 3, 2), (2, 10, 1, 5, 1), (5, 9, 4, 1, 1), (4, 6, 2, 2, 2)],
)
def test_grouped_router_equals_the_reference(
    tokens: int, experts: int, chosen: int, groups: int, kept: int
) -> None:
    args = *case(tokens, experts), chosen
    how: dict[str, Any] = {"num_groups": groups, "groups_chosen": kept, "scale": 2.5}
    got = grouped_sigmoid_router(*args, **how)
    check(got, reference.grouped_sigmoid_router(*args, **how), experts)


@pytest.mark.usefixtures("fused")
def test_of_equal_experts_the_lowest_ids_are_taken() -> None:
    x, weight, bias = case(2, 24)
    # Whole numbers, because the interpreter's products add up in an order of their own.
    x, weight, bias = x.round(), (8 * weight[:1]).round().repeat(24, 1), bias * 0
    for dtype in (torch.float32, torch.bfloat16):
        with exact_bfloat16():
            args = x.to(dtype), weight, bias, 3
            assert softmax_router(*args).ids_TK.tolist() == [[0, 1, 2]] * 2
            how: dict[str, Any] = {"num_groups": 4, "groups_chosen": 2, "scale": 1.0}
            got = grouped_sigmoid_router(*args, **how)
            assert got.ids_TK.tolist() == [[0, 1, 2]] * 2


def test_bfloat16_states_are_multiplied_as_exactly_as_in_float32() -> None:
    x, weight, _ = case(20, 70, hidden=600)
    weight *= torch.logspace(-6, 3, 600, device=DEVICE)
    x = x.bfloat16()
    with exact_bfloat16():
        logits_CTE, _ = split_logits(x, weight, pdl=False)
    assert len(logits_CTE) == 19
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    error = (logits_CTE.double().sum(0) - exact).abs() / scale
    assert float(error.max()) < 3e-7
    rounded = (x @ weight.bfloat16().T).double()
    assert float(((rounded - exact).abs() / scale).max()) > 1e-4


def test_a_token_s_logits_do_not_depend_on_how_many_there_are() -> None:
    x, weight, _ = case(40, 20)
    assert torch.equal(
        split_logits(x, weight, pdl=False)[0][:, 3:4], split_logits(x[3:4], weight, pdl=False)[0]
    )
