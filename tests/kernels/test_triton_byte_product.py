"""Products with a byte a weight in Triton, and rows rounded to float8, against torch."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import DEVICE  # isort: skip
from tests.helpers.triton_bfloat16 import exact_bfloat16  # isort: skip
from diffray.kernels import quantize, quantized
from diffray.kernels.formats import FORMATS
from diffray.kernels.quantize import Quantized
from diffray.kernels.triton import byte_product, float8_rows
from diffray.kernels.triton.byte_product import quantized_linear

KINDS = ["int8", "fp8", "w8a8_fp8"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def case(kind: str, rows: int, inputs: int, outputs: int) -> tuple[Tensor, Quantized, Tensor]:
    torch.manual_seed(rows + inputs)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5
    kept = quantize.quantize(weight.to(DEVICE), FORMATS[kind])
    return x.to(DEVICE), kept, torch.randn(outputs).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 16, 300])
@pytest.mark.rotate(3)
def test_rows_are_rounded_to_the_same_bits_on_every_device(
    columns: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(columns)
    sizes = torch.logspace(-3, 3, 40).unsqueeze(1)
    x = (torch.randn(40, columns) * sizes).to(dtype)
    x[1, :], x[2, 0] = 0, 5000  # nothing, and one that makes the others small
    # Every number of float8 and what lies between two of them, with a largest of all significands.
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    between = (numbers.float()[:-1] + numbers.float()[1:]) / 2
    every = torch.cat([numbers.float(), between]).nan_to_num()
    ends = 448 * torch.linspace(0.5, 1, 60).unsqueeze(1)
    tried = torch.cat([every.expand(60, -1), ends], dim=1).to(dtype)
    for rows in (x.to(DEVICE), tried.to(DEVICE)):
        expected, scale = quantize.float8_rows(rows)
        with exact_bfloat16():
            got, own_scale = float8_rows.float8_rows(rows)
            apart = float8_rows.round_rows(rows)
        assert torch.equal(own_scale, scale)
        assert torch.equal(got.float(), expected.float())
        assert torch.equal(apart, quantize.round_rows(rows))


# The last split may have fewer columns, and the last tile fewer rows.
SIZES = (1, 16, 16), (33, 130, 64), (70, 64, 40), (5, 200, 70)


@pytest.mark.parametrize(
    ("kind", "rows", "inputs", "outputs"),
    [
        *((k, *size) for size in SIZES for k in KINDS),
        (KINDS[0], 3, 96, 4200),
        *(pytest.param(k, 3, 96, 4200, marks=pytest.mark.long) for k in KINDS[1:]),
    ],
)
@pytest.mark.rotate(4)
def test_products_equal_the_reference(kind: str, rows: int, inputs: int, outputs: int) -> None:
    x, kept, bias = case(kind, rows, inputs, outputs)
    for added in (None, bias):
        got = quantized_linear(x, kept, added)
        expected = quantized.quantized_linear(x, kept, added)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert quantized_linear(x[:0], kept, bias).shape == (0, outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_bits_in_every_batch(kind: str) -> None:
    x, kept, bias = case(kind, 30, 200, 70)
    x = (x * 4).round()  # sums are exact, whatever order the interpreter's library adds in
    alone = quantized_linear(x[7:8], kept, bias)
    assert torch.equal(quantized_linear(x, kept, bias)[7:8], alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "outputs"), [(3, 48), (20, 48), (70, 48), (70, 40)])
def test_bfloat16_is_multiplied_as_exactly_by_whatever_suits_it(
    kind: str, rows: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rounded rows by torch's product of float8, which refuses 40 outputs."""
    multiply = Mock(wraps=byte_product.scaled_mm)
    monkeypatch.setattr(byte_product, "scaled_mm", multiply)
    x, kept, bias = case(kind, rows, 96, outputs)
    args = x.bfloat16(), kept, bias.bfloat16()
    expected = quantized.quantized_linear(args[0].double(), kept, args[2].double())
    with exact_bfloat16():
        got = quantized_linear(*args).double()
    assert float((got - expected).norm() / expected.norm()) < 0.006
    assert multiply.called == (kind == "w8a8_fp8" and rows == 70 and outputs == 48)


@pytest.mark.parametrize("louder", [1.0, 1e5])
def test_what_float16_cannot_hold_is_multiplied_in_it_all_the_same(louder: float) -> None:
    x, kept, _ = case("fp8", 20, 96, 48)
    loud = (x * louder).bfloat16()
    expected = quantized.quantized_linear(loud.double(), kept)
    with exact_bfloat16():
        got = quantized_linear(loud, kept).double()
    assert float((got - expected).norm() / expected.norm()) < 0.004
