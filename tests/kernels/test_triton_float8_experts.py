"""Experts whose inputs are float8 rows too, in Triton, against torch."""

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import DEVICE  # isort: skip
from tests.helpers.triton_bfloat16 import exact_bfloat16  # isort: skip
from diffray.kernels import quantized
from diffray.kernels.formats import FORMATS
from diffray.kernels.quantize import quantize
from diffray.kernels.router import Routing, list_pairs
from diffray.kernels.triton.float8_experts import FLOAT8_EXPERTS

REFERENCE, PROGRAM = FLOAT8_EXPERTS.reference, FLOAT8_EXPERTS.program
HIDDEN, WIDTH, EXPERTS, CHOSEN = 48, 32, 6, 3


def case(tokens: int) -> list[Tensor]:
    """Return tokens, float8 weights and their scales, each token's experts and weights."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN)
    w31 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5
    kept = [quantize(w, FORMATS["w8a8_fp8"]) for w in (w31, w2)]
    parts = [part for w in kept for part in (w.values_EOI, w.scale_EOG.squeeze(2))]
    weights, ids = torch.randn(tokens, EXPERTS).softmax(-1).topk(CHOSEN)
    return [part.to(DEVICE) for part in (x, *parts, ids, weights)]


def of_rank(args: list[Tensor]) -> list[Tensor]:
    """Return the same for a rank that has two of the experts."""
    x, *weights, ids, shares = args
    return [x, *(part[2:4].contiguous() for part in weights), ids - 2, shares]


def distance(got: Tensor, expected: Tensor) -> float:
    size = expected.double().norm().clamp(min=1e-9)  # a rank may have none of a token's experts
    return float((got.double() - expected.double()).norm() / size)


@pytest.mark.parametrize("tokens", [1, 11, pytest.param(40, marks=pytest.mark.long)])
def test_experts_equal_the_reference(tokens: int) -> None:
    args = case(tokens)
    for these in (args, of_rank(args)):
        assert distance(PROGRAM(*these), REFERENCE(*these)) < 1e-3
    nobody = [*args[:5], torch.full_like(args[5], EXPERTS), args[6]]
    assert torch.equal(PROGRAM(*nobody), torch.zeros_like(args[0]))


def test_pairs_that_the_router_lists_for_all_ranks_are_cut() -> None:
    """Those of a rank's experts begin behind those of the ranks before it."""
    args = case(20)
    own = of_rank(args)
    listed = Routing(args[5], args[6], *list_pairs(args[5], EXPERTS)).of(2, 4)
    assert listed.pairs is not None and int(listed.pairs.starts_E[0]) > 0
    assert torch.equal(PROGRAM(*own, listed.pairs), PROGRAM(*own))


@pytest.mark.parametrize("tokens", [3, 50])
def test_experts_in_bfloat16_equal_the_reference(tokens: int) -> None:
    """Where a number lies between two of float8, bfloat16's last bit decides."""
    args = case(tokens)
    x, weights = args[0].bfloat16(), args[-1].bfloat16()
    expected = REFERENCE(x.double(), *args[1:6], weights.double())
    with exact_bfloat16():
        got = PROGRAM(x, *args[1:6], weights)
    assert got.dtype == torch.bfloat16 and distance(got, expected) < 0.03


def test_rounding_what_experts_take_is_not_left_out() -> None:
    """Products of float8 weights alone are as far from it as rounding moves numbers."""
    args = case(40)
    x, w31, scale31, w2, scale2, ids, weights = args
    unrounded = quantized.quantized_experts_forward(x, w31, scale31, w2, scale2, ids, weights)
    assert 0.01 < distance(PROGRAM(*args), unrounded) < 0.1
