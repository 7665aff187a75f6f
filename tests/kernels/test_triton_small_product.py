"""A product of few rows with the norm behind it, in Triton against torch."""

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import DEVICE  # isort: skip
from tests.helpers.triton_bfloat16 import exact_bfloat16  # isort: skip
from diffray.kernels import linear
from diffray.kernels.triton.small_product import (
    LINEAR_ADD_NORM,
    linear_add_norm,
    split_product,
)

SIZES = [(1, 16, 16), (5, 200, 70), (33, 130, 64), (3, 96, 4100)]  # rows, inputs, outputs


def case(rows: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + inputs)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5
    residual, norm = torch.randn(rows, outputs), torch.randn(outputs)
    found = (part.to(DEVICE) for part in (x, weight, residual, norm))
    return next(found), next(found), next(found), next(found)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_the_sum_and_its_norm_equal_the_reference(
    rows: int, inputs: int, outputs: int, fused: bool
) -> None:
    args = case(rows, inputs, outputs)
    before = args[2].clone()
    got = linear_add_norm(*args, 1e-5, fused=fused)
    expected = linear.linear_add_norm(*args, 1e-5)
    assert torch.equal(args[2], before)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    empty = linear_add_norm(args[0][:0], args[1], args[2][:0], args[3], 1e-5, fused=fused)
    assert [part.shape for part in empty] == [(0, outputs)] * 2


@pytest.mark.parametrize(("inputs", "splits"), [(16, 1), (200, 4), (2048, 32)])
def test_narrow_outputs_are_split_so_that_many_programs_read(inputs: int, splits: int) -> None:
    x, weight, *_ = case(2, inputs, 256)
    parts = split_product(x, weight)
    assert len(parts) == splits and parts.dtype == torch.float32
    torch.testing.assert_close(parts.sum(0), x @ weight.T, atol=1e-5, rtol=1e-4)


def test_every_variant_equals_the_reference_in_bfloat16() -> None:
    args = [part.bfloat16() for part in case(20, 96, 48)]
    x, weight, residual, norm = (part.float() for part in args)
    expected = linear.linear_add_norm(x, weight, residual, norm, 1e-5)
    *variants, _ = LINEAR_ADD_NORM.variants(*args, 1e-5)
    assert any(variant.name.startswith("triton fused") for variant in variants)
    with exact_bfloat16():
        found = [variant.run(*args, 1e-5) for variant in variants]
    for got in found:
        for ours, theirs in zip(got, expected, strict=True):
            assert float((ours.float() - theirs).norm() / theirs.norm()) < 0.006


def test_the_sum_is_rounded_where_the_product_s_output_is() -> None:
    x, weight, residual, norm = (part.half() for part in case(9, 96, 48))
    total, _ = linear_add_norm(x, weight, residual, norm, 1e-5, fused=True)
    assert torch.equal(total, residual + split_product(x, weight).sum(0).half())


def test_many_rows_and_exact_ones_are_left_to_torch_s_product() -> None:
    x, weight, residual, norm = case(2, 16, 16)
    names = {v.name for v in LINEAR_ADD_NORM.variants(x, weight, residual, norm, 1e-5)}
    many = torch.zeros(65, 16, dtype=torch.bfloat16)
    names |= {v.name for v in LINEAR_ADD_NORM.variants(many, weight, residual, norm, 1e-5)}
    assert not any("fused" in name for name in names)
