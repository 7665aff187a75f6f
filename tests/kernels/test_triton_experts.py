"""The experts' Triton kernels against torch."""

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import DEVICE  # isort: skip
from tests.helpers.triton_bfloat16 import exact_bfloat16  # isort: skip
from diffray.kernels import experts as reference
from diffray.kernels.experts import ExpertWeights
from diffray.kernels.formats import FORMATS
from diffray.kernels.quantize import Quantized, quantize
from diffray.kernels.router import Routing, list_pairs
from diffray.kernels.triton import pairs
from diffray.kernels.triton.experts import (
    EXPERTS,
    experts_add_norm,
    tile_for,
)
from diffray.kernels.triton.experts import experts as program
from diffray.kernels.triton.norm import add_norm

Args = tuple[Tensor, ExpertWeights, Routing]


def case(tokens: int, experts: int, chosen: int, hidden: int, width: int) -> Args:
    torch.manual_seed(tokens + hidden)
    x = torch.randn(tokens, hidden)
    w31 = torch.randn(experts, 2 * width, hidden) / hidden**0.5
    w2 = torch.randn(experts, hidden, width) / width**0.5
    weights, ids = torch.randn(tokens, experts).softmax(-1).topk(chosen)
    x, w31, w2, ids, weights = (part.to(DEVICE) for part in (x, w31, w2, ids, weights))
    return x, ExpertWeights(w31, w2), Routing(ids, weights)


def in_format(experts: ExpertWeights, name: str) -> ExpertWeights:
    w31, w2 = experts[:2]
    assert isinstance(w31, Tensor) and isinstance(w2, Tensor)
    return ExpertWeights(quantize(w31, FORMATS[name]), quantize(w2, FORMATS[name]))


def part_of(experts: ExpertWeights, start: int, stop: int) -> ExpertWeights:
    """Return some of the experts, as a rank has them."""

    def cut(w: Tensor | Quantized) -> Tensor | Quantized:
        if isinstance(w, Tensor):
            return w[start:stop].contiguous()
        parts = (w.values_EOI, w.scale_EOG)
        values, scale = (part[start:stop].contiguous() for part in parts)
        return Quantized(w.format, values, scale, None)

    return ExpertWeights(cut(experts.w31_EFH), cut(experts.w2_EHI))


def check(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def narrow(args: Args, dtype: torch.dtype = torch.bfloat16) -> Args:
    x, (w31, w2, _), routing = args
    assert isinstance(w31, Tensor) and isinstance(w2, Tensor)
    shares = routing.weights_TK.to(dtype)
    experts = ExpertWeights(w31.to(dtype), w2.to(dtype))
    return x.to(dtype), experts, routing._replace(weights_TK=shares)


def distance(got: Tensor, expected: Tensor) -> float:
    size = expected.double().norm().clamp(min=1e-9)  # a rank may have none of a token's experts
    return float((got.double() - expected.double()).norm() / size)


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
    x, own, routing = case(tokens, experts, chosen, hidden, width)
    check(program(x, own, routing), reference.experts(x, own, routing))
    none = Routing(routing.ids_TK[:0], routing.weights_TK[:0])
    assert program(x[:0], own, none).shape == (0, hidden)
    nobody = routing._replace(ids_TK=torch.full_like(routing.ids_TK, experts))
    assert torch.equal(program(x, own, nobody), torch.zeros_like(x))


def test_all_tokens_at_one_expert_go_through_several_tiles() -> None:
    x, own, routing = case(150, 64, 1, 16, 16)
    assert tile_for(150 / 64, x, own).rows < 150
    routing = routing._replace(ids_TK=torch.full_like(routing.ids_TK, 5))
    got = program(x, own, routing)
    check(got, reference.experts(x, own, routing))
    alone = program(x[3:4], own, Routing(routing.ids_TK[3:4], routing.weights_TK[3:4]))
    assert torch.equal(got[3:4], alone)


@pytest.mark.parametrize("name", [None, "w8a8_fp8"])
def test_pairs_that_the_router_lists_are_not_listed_again(name: str | None) -> None:
    """Of a rank's experts they begin behind those of the ranks before it."""
    x, whole, routing = case(13, 6, 3, 48, 20)
    whole = whole if name is None else in_format(whole, name)
    ids, shares = routing[:2]
    own, listed = part_of(whole, 2, 4), Routing(ids, shares, *list_pairs(ids, 6)).of(2, 4)
    assert listed.pairs is not None and int(listed.pairs.starts_E[0]) > 0
    got = program(x, own, listed)
    assert torch.equal(got, program(x, own, Routing(listed.ids_TK, shares)))
    # Experts of other ranks add nothing.
    assert distance(got, reference.experts(x, own, listed)) < 1e-3
    wrong = list_pairs(ids, 6)
    wrong = wrong._replace(order_S=wrong.order_S.flip(0))  # other experts' pairs
    assert not torch.equal(program(x, whole, Routing(ids, shares, *wrong)), got)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("rank", "dtype"), [(0, torch.float32), (1, torch.float32), (0, torch.float16)]
)
@pytest.mark.rotate(2)
def test_experts_and_the_norm_that_follows_equal_the_reference(
    shared: bool, rank: int, dtype: torch.dtype
) -> None:
    """The fused norm rounds where separate kernels round."""
    x, whole, routing = narrow(case(12, 6, 3, 48, 36), dtype)
    added = torch.randn(2, 12, 48, device=DEVICE).to(dtype)
    norm = torch.randn(48, device=DEVICE).to(dtype)
    own, chosen = part_of(whole, 0, 4), routing.of(2 * rank, 4)
    rest = added[0] if shared else None, added[1], norm, 1e-5
    got = experts_add_norm(x, own, chosen, *rest)
    summed = program(x, own, chosen)
    expected = add_norm(summed + added[0] if shared else summed, *rest[1:])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    if dtype == torch.float32:
        theirs = reference.experts_add_norm(x, own, chosen, *rest)
        for one, other in zip(got, theirs, strict=True):
            check(one, other)
    nobody = Routing(chosen.ids_TK[:0], chosen.weights_TK[:0])
    none = experts_add_norm(x[:0], own, nobody, None, x[:0], norm, 1e-5)
    assert [part.shape for part in none] == [(0, 48)] * 2


# Of 50 tokens a tile of 64 rows holds all that an expert can get.
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(3, 5, 2), (50, 5, 2), (100, 2, 1)])
def test_experts_in_bfloat16_equal_the_reference(tokens: int, experts: int, chosen: int) -> None:
    args = narrow(case(tokens, experts, chosen, 40, 24))
    ids = args[2].ids_TK
    ids[: tokens // 2] = ids[0]  # half of the tokens choose the same experts
    expected = reference.experts(*narrow(args, torch.float32))
    with exact_bfloat16():
        got = program(*args).float()
    assert distance(got, expected) < 0.006  # three roundings


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_quantized_experts_equal_their_weights_scaled_back(name: str) -> None:
    x, plain, routing = case(12, 5, 2, 48, 36)
    kept = in_format(plain, name)
    got = program(x, kept, routing)
    check(got, reference.experts(x, kept, routing))
    assert 0 < distance(got, reference.experts(x, plain, routing)) < 0.06


@pytest.mark.parametrize("name", ["int4", "w8a8_fp8 and plain"])
def test_other_formats_run_torch_s(name: str) -> None:
    x, plain, routing = case(5, 4, 2, 32, 32)
    kept = in_format(plain, name.split()[0])
    if "plain" in name:
        kept = kept._replace(w2_EHI=plain.w2_EHI)
    expected = reference.experts(x, kept, routing)
    assert torch.equal(program(x, kept, routing), expected)
    norm = torch.randn(32, device=DEVICE)
    for got, theirs in zip(
        experts_add_norm(x, kept, routing, None, x, norm, 1e-5),
        reference.experts_add_norm(x, kept, routing, None, x, norm, 1e-5),
        strict=True,
    ):
        check(got, theirs)


# Of 100 tokens a tile has 128 rows.
@pytest.mark.parametrize(("tokens", "louder"), [(20, 1.0), (20, 300.0), (100, 1.0)])
def test_float8_weights_are_multiplied_in_float16_whatever_the_range(
    tokens: int, louder: float
) -> None:
    """Between the louder products numbers exceed float16's largest."""
    x, (w31, w2, _), routing = narrow(case(tokens, 5, 2, 48, 36))
    assert isinstance(w31, Tensor)
    kept = in_format(ExpertWeights(w31 * louder, w2), "fp8")
    routing = routing._replace(weights_TK=routing.weights_TK.float())
    expected = reference.experts(x.float(), kept, routing)
    with exact_bfloat16():
        got = program(x, kept, routing).float()
        x[0, 0] = 1e6  # no float16 number, and one of thousands
        assert program(x, kept, routing).isfinite().all()
    assert distance(got, expected) < 0.004


@pytest.mark.parametrize("tokens", [1, 11, pytest.param(40, marks=pytest.mark.long)])
def test_experts_of_float8_rows_equal_the_reference(tokens: int) -> None:
    x, plain, routing = case(tokens, 6, 3, 48, 32)
    kept = in_format(plain, "w8a8_fp8")
    for own, chosen in ((kept, routing), (part_of(kept, 2, 4), routing.of(2, 4))):
        assert distance(program(x, own, chosen), reference.experts(x, own, chosen)) < 1e-3
    nobody = routing._replace(ids_TK=torch.full_like(routing.ids_TK, 6))
    assert torch.equal(program(x, kept, nobody), torch.zeros_like(x))


@pytest.mark.parametrize("tokens", [3, 50])
def test_experts_of_float8_rows_in_bfloat16_equal_the_reference(tokens: int) -> None:
    """Where a number lies between two of float8, bfloat16's last bit decides."""
    x, plain, routing = case(tokens, 6, 3, 48, 32)
    kept, (ids, shares, *_) = in_format(plain, "w8a8_fp8"), routing
    x, shares = x.bfloat16(), shares.bfloat16()
    expected = reference.experts(x.double(), kept, Routing(ids, shares.double()))
    with exact_bfloat16():
        got = program(x, kept, Routing(ids, shares))
    assert got.dtype == torch.bfloat16 and distance(got, expected) < 0.03
    assert EXPERTS.allowed(x.float(), kept) == EXPERTS.allowed(x, plain)


def test_rounding_what_experts_take_is_not_left_out() -> None:
    """Products of float8 weights alone are as far from it as rounding moves numbers."""
    x, plain, routing = case(40, 6, 3, 48, 32)
    unrounded = reference.experts(x, in_format(plain, "fp8"), routing)
    assert 0.01 < distance(program(x, in_format(plain, "w8a8_fp8"), routing), unrounded) < 0.1


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
