"""The experts' Triton kernels against torch."""

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import DEVICE  # isort: skip
from tests.helpers.triton_bfloat16 import exact_bfloat16  # isort: skip
from diffray.kernels import quantized
from diffray.kernels.experts import experts_forward as reference
from diffray.kernels.formats import FORMATS
from diffray.kernels.quantize import quantize
from diffray.kernels.router import Routing, list_pairs
from diffray.kernels.triton import pairs
from diffray.kernels.triton.experts import (
    EXPERTS,
    experts_add_norm,
    experts_forward,
    quantized_experts_forward,
    tile_for,
)
from diffray.kernels.triton.norm import add_norm


def case(tokens: int, experts: int, chosen: int, hidden: int, width: int) -> list[Tensor]:
    torch.manual_seed(tokens + hidden)
    x = torch.randn(tokens, hidden)
    w31 = torch.randn(experts, 2 * width, hidden) / hidden**0.5
    w2 = torch.randn(experts, hidden, width) / width**0.5
    weights, ids = torch.randn(tokens, experts).softmax(-1).topk(chosen)
    return [part.to(DEVICE) for part in (x, w31, w2, ids, weights)]


def check(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def narrow(args: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [part.to(dtype) if part.is_floating_point() else part for part in args]


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "width"),
    [
        (1, 3, 1, 16, 16),
        (11, 8, 3, 70, 37),
        pytest.param(40, 2, 2, 96, 130, marks=pytest.mark.long),
        pytest.param(3, 9, 2, 64, 64, marks=pytest.mark.long),
    ],
)
def test_experts_equal_the_reference(
    tokens: int, experts: int, chosen: int, hidden: int, width: int
) -> None:
    """Also where there are no tokens, or none for these experts."""
    x, w31, w2, ids, weights = case(tokens, experts, chosen, hidden, width)
    check(experts_forward(x, w31, w2, ids, weights), reference(x, w31, w2, ids, weights))
    assert experts_forward(x[:0], w31, w2, ids[:0], weights[:0]).shape == (0, hidden)
    none = experts_forward(x, w31, w2, torch.full_like(ids, experts), weights)
    assert torch.equal(none, torch.zeros_like(x))


def test_all_tokens_at_one_expert_go_through_several_tiles() -> None:
    x, w31, w2, ids, weights = case(150, 64, 1, 16, 16)
    assert tile_for(150 / 64, x, w2).rows < 150
    ids = torch.full_like(ids, 5)
    got = experts_forward(x, w31, w2, ids, weights)
    check(got, reference(x, w31, w2, ids, weights))
    alone = experts_forward(x[3:4], w31, w2, ids[3:4], weights[3:4])
    assert torch.equal(got[3:4], alone)


def test_pairs_that_the_router_lists_are_not_listed_again() -> None:
    x, w31, w2, ids, weights = case(13, 6, 3, 48, 20)
    listed = Routing(ids, weights, *list_pairs(ids, 6)).of(2, 4)
    args = x, w31[2:4].contiguous(), w2[2:4].contiguous(), listed.ids_TK, weights
    assert torch.equal(experts_forward(*args, listed.pairs), experts_forward(*args))
    check(experts_forward(*args), reference(*args))  # experts of other ranks add nothing
    whole = x, w31, w2, ids, weights
    wrong = list_pairs(ids, 6)
    wrong = wrong._replace(order_S=wrong.order_S.flip(0))  # other experts' pairs
    assert not torch.equal(experts_forward(*whole, wrong), experts_forward(*whole))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("rank", "dtype"), [(0, torch.float32), (1, torch.float32), (0, torch.float16)]
)
@pytest.mark.rotate(2)
def test_experts_and_the_norm_that_follows_equal_the_reference(
    shared: bool, rank: int, dtype: torch.dtype
) -> None:
    """The fused norm rounds where separate kernels round."""
    x, w31, w2, ids, weights = narrow(case(12, 6, 3, 48, 36), dtype)
    added = torch.randn(2, 12, 48, device=DEVICE).to(dtype)
    norm = torch.randn(48, device=DEVICE).to(dtype)
    own = w31[:4].contiguous(), w2[:4].contiguous()
    args = x, own[0], None, own[1], None, ids - 2 * rank, weights, None
    rest = added[0] if shared else None, added[1], norm, 1e-5
    got = experts_add_norm(*args, *rest)
    summed = experts_forward(x, *own, ids - 2 * rank, weights)
    expected = add_norm(summed + added[0] if shared else summed, *rest[1:])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    if dtype == torch.float32:
        for ours, theirs in zip(got, quantized.experts_add_norm(*args, *rest), strict=True):
            check(ours, theirs)
    none = experts_add_norm(x[:0], *args[1:5], ids[:0], *args[6:], None, x[:0], norm, 1e-5)
    assert [part.shape for part in none] == [(0, 48)] * 2


# Of 50 tokens a tile of 64 rows holds all that an expert can get.
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(3, 5, 2), (50, 5, 2), (100, 2, 1)])
def test_experts_in_bfloat16_equal_the_reference(tokens: int, experts: int, chosen: int) -> None:
    args = narrow(case(tokens, experts, chosen, 40, 24))
    args[3][: tokens // 2] = args[3][0]  # half of the tokens choose the same experts
    x, w31, w2, ids, weights = narrow(args, torch.float32)
    expected = reference(x, w31, w2, ids, weights)
    with exact_bfloat16():
        got = EXPERTS.program(*args).float()
    assert float((got - expected).norm() / expected.norm()) < 0.006  # three roundings


def in_bytes(w: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the bytes, and the scale of each row [E, O]."""
    kept = quantize(w, FORMATS[name])
    return kept.values_EOI, kept.scale_EOG.squeeze(2)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_quantized_experts_equal_their_weights_scaled_back(name: str) -> None:
    x, w31, w2, ids, weights = case(12, 5, 2, 48, 36)
    q13, q2 = in_bytes(w31, name), in_bytes(w2, name)
    args = (x, *q13, *q2, ids, weights)
    got = quantized_experts_forward(*args)
    check(got, quantized.quantized_experts_forward(*args))
    exact = reference(x, w31, w2, ids, weights)
    assert 0 < float((got - exact).norm() / exact.norm()) < 0.06


# Of 100 tokens a tile has 128 rows.
@pytest.mark.parametrize(("tokens", "louder"), [(20, 1.0), (20, 300.0), (100, 1.0)])
def test_float8_weights_are_multiplied_in_float16_whatever_the_range(
    tokens: int, louder: float
) -> None:
    """Between the louder products numbers exceed float16's largest."""
    x, w31, w2, ids, weights = narrow(case(tokens, 5, 2, 48, 36))
    quantized_ones = [in_bytes(w, "fp8") for w in (w31 * louder, w2)]
    args = (*quantized_ones[0], *quantized_ones[1], ids, weights.float(), None)
    expected = quantized.quantized_experts_forward(x.float(), *args)
    with exact_bfloat16():
        got = quantized_experts_forward(x, *args).float()
        x[0, 0] = 1e6  # no float16 number, and one of thousands
        assert quantized_experts_forward(x, *args).isfinite().all()
    assert float((got - expected).norm() / expected.norm()) < 0.004


# Of 5,000 pairs a program looks at a part at a time.
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (40, 8), (2500, 2)])
def test_each_expert_s_pairs_are_listed_in_their_order(tokens: int, chosen: int) -> None:
    torch.manual_seed(tokens)
    ids = torch.randint(-1, 7, (tokens, chosen), device=DEVICE)
    starts, order = pairs.list_pairs(ids, 6)
    flat = ids.flatten()
    expected = [(flat == expert).nonzero().flatten() for expert in range(6)]
    assert starts.tolist() == [0, *torch.tensor([len(x) for x in expected]).cumsum(0).tolist()]
    assert torch.equal(order[: int(starts[-1])].long(), torch.cat(expected))
