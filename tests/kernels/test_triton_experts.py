"""The experts' Triton kernels against torch."""

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import DEVICE  # isort: skip
from diffray.kernels import quantized
from diffray.kernels.experts import experts_forward as reference
from diffray.kernels.quantized import quantize_rows
from diffray.kernels.router import Pairs, Routing, list_pairs
from diffray.kernels.triton.experts import (
    experts_forward,
    quantized_experts_forward,
    tile_for,
)


def case(tokens: int, experts: int, chosen: int, hidden: int, width: int) -> list[Tensor]:
    torch.manual_seed(tokens + hidden)
    x = torch.randn(tokens, hidden)
    w13 = torch.randn(experts, 2 * width, hidden) / hidden**0.5
    w2 = torch.randn(experts, hidden, width) / width**0.5
    weights, ids = torch.randn(tokens, experts).softmax(-1).topk(chosen)
    return [part.to(DEVICE) for part in (x, w13, w2, ids, weights)]


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "width"),
    [(1, 3, 1, 16, 16), (11, 8, 3, 70, 37), (40, 2, 2, 96, 130), (3, 9, 2, 64, 64)],
)
def test_experts_equal_the_reference(
    tokens: int, experts: int, chosen: int, hidden: int, width: int
) -> None:
    x, w13, w2, ids, weights = case(tokens, experts, chosen, hidden, width)
    torch.testing.assert_close(
        experts_forward(x, w13, w2, ids, weights),
        reference(x, w13, w2, ids, weights),
        atol=1e-5,
        rtol=1e-4,
    )


def test_experts_of_other_ranks_add_nothing() -> None:
    x, w13, w2, ids, weights = case(13, 6, 3, 48, 20)
    some = experts_forward(x, w13[2:4].contiguous(), w2[2:4].contiguous(), ids - 2, weights)
    expected = reference(x, w13[2:4], w2[2:4], ids - 2, weights)
    torch.testing.assert_close(some, expected, atol=1e-5, rtol=1e-4)
    none = experts_forward(x, w13, w2, torch.full_like(ids, 6), weights)
    assert torch.equal(none, torch.zeros_like(x))


def test_pairs_that_the_router_lists_are_not_listed_again() -> None:
    x, w13, w2, ids, weights = case(13, 6, 3, 48, 20)
    listed = Routing(ids, weights, *list_pairs(ids, 6)).of(2, 4)
    args = x, w13[2:4].contiguous(), w2[2:4].contiguous(), listed.ids_TK, weights
    assert torch.equal(experts_forward(*args, listed.pairs), experts_forward(*args))
    none = Pairs(torch.zeros(3, dtype=torch.int32, device=DEVICE), list_pairs(ids, 6).order_S)
    assert not torch.equal(experts_forward(*args, none), experts_forward(*args))


def test_all_tokens_at_one_expert_go_through_several_tiles() -> None:
    x, w13, w2, ids, weights = case(150, 64, 1, 16, 16)
    assert tile_for(150 / 64, 4).rows < 150
    ids = torch.full_like(ids, 5)
    expected = reference(x, w13, w2, ids, weights)
    torch.testing.assert_close(
        experts_forward(x, w13, w2, ids, weights), expected, atol=1e-5, rtol=1e-4
    )


def test_a_token_gets_the_same_bits_whoever_else_is_there() -> None:
    x, w13, w2, ids, weights = case(16, 8, 2, 32, 32)
    alone = experts_forward(x[3:4], w13, w2, ids[3:4], weights[3:4])
    assert torch.equal(experts_forward(x, w13, w2, ids, weights)[3:4], alone)


def test_no_tokens_give_no_rows() -> None:
    x, w13, w2, ids, weights = case(4, 3, 2, 16, 16)
    assert experts_forward(x[:0], w13, w2, ids[:0], weights[:0]).shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_experts_equal_their_weights_scaled_back(dtype: torch.dtype) -> None:
    x, w13, w2, ids, weights = case(12, 5, 2, 48, 36)
    q13, q2 = quantize_rows(w13, dtype), quantize_rows(w2, dtype)
    args = (x, *q13, *q2, ids, weights)
    got = quantized_experts_forward(*args)
    torch.testing.assert_close(
        got, quantized.quantized_experts_forward(*args), atol=1e-5, rtol=1e-4
    )
    exact = reference(x, w13, w2, ids, weights)
    assert 0 < float((got - exact).norm() / exact.norm()) < 0.06


def test_quantized_rows_come_back_within_half_a_step() -> None:
    torch.manual_seed(0)
    w = torch.randn(3, 5, 40) * torch.tensor([1e-3, 1.0, 50.0]).view(3, 1, 1)
    w[1, 2] = 0
    values, scale = quantize_rows(w, torch.int8)
    assert values.dtype == torch.int8 and int(values.abs().max()) == 127
    assert bool(((values * scale.unsqueeze(2) - w).abs() <= 0.501 * scale.unsqueeze(2)).all())
