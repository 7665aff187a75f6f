"""Routers in Triton against torch."""

import pytest
import torch

from tests.helpers.triton_device import DEVICE  # isort: skip
from diffray.kernels import router as reference
from diffray.kernels.triton.router import grouped_sigmoid_topk, softmax_topk


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 3, 3), (9, 20, 4), (4, 64, 8)])
def test_softmax_router_equals_the_reference(
    tokens: int, experts: int, chosen: int, biased: bool
) -> None:
    torch.manual_seed(experts)
    logits = torch.randn(tokens, experts, device=DEVICE)
    bias = torch.randn(experts, device=DEVICE) / 8 if biased else None
    ids, weights = softmax_topk(logits, bias, chosen)
    expected = reference.softmax_topk(logits, bias, chosen)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1])
    assert softmax_topk(logits[:0], bias, chosen)[0].shape == (0, chosen)


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "groups", "kept"),
    [(7, 32, 4, 8, 4), (3, 12, 3, 3, 2), (2, 10, 1, 5, 1), (5, 9, 4, 1, 1), (4, 6, 2, 2, 2)],
)
def test_grouped_router_equals_the_reference(
    tokens: int, experts: int, chosen: int, groups: int, kept: int
) -> None:
    torch.manual_seed(experts)
    logits = torch.randn(tokens, experts, device=DEVICE)
    bias = torch.randn(experts, device=DEVICE) / 2
    how = {"num_groups": groups, "groups_chosen": kept}
    ids, weights = grouped_sigmoid_topk(logits, bias, chosen, **how, scale=2.5)
    expected = reference.grouped_sigmoid_topk(logits, bias, chosen, **how, scale=2.5)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1])


def test_of_equal_experts_the_lowest_ids_are_taken() -> None:
    logits = torch.zeros(2, 24, device=DEVICE)
    assert softmax_topk(logits, None, 3)[0].tolist() == [[0, 1, 2]] * 2
    ids, _ = grouped_sigmoid_topk(logits, logits[0], 3, num_groups=4, groups_chosen=2, scale=1.0)
    assert ids.tolist() == [[0, 1, 2]] * 2
