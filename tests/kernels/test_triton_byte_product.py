"""Products with a byte a weight in Triton, and rows rounded to float8, against torch."""

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import DEVICE  # isort: skip
from tests.helpers.triton_bfloat16 import exact_bfloat16, run_variants  # isort: skip
from diffray.kernels import quantize, quantized
from diffray.kernels.formats import FORMATS
from diffray.kernels.quantize import Quantized
from diffray.kernels.triton import float8_rows
from diffray.kernels.triton.byte_product import QUANTIZED_LINEAR, quantized_linear
from diffray.kernels.variants import Tile

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
TILES = Tile(16, 16, 16, 1, 1), Tile(64, 32, 64, 4, 2)


@pytest.mark.parametrize(
    ("kind", "rows", "inputs", "outputs", "tile"),
    [
        *((k, *size, None) for size in [(1, 16, 16), (33, 130, 64), (70, 64, 40)] for k in KINDS),
        *((k, 5, 200, 70, None) for k in KINDS),
        *(("int8", 20, 200, 70, tile) for tile in TILES),
        (KINDS[0], 3, 96, 4200, None),
        *(pytest.param(k, 3, 96, 4200, None, marks=pytest.mark.long) for k in KINDS[1:]),
    ],
)
@pytest.mark.rotate(4)
def test_products_equal_the_reference(
    kind: str, rows: int, inputs: int, outputs: int, tile: Tile | None
) -> None:
    x, kept, bias = case(kind, rows, inputs, outputs)
    for added in (None, bias):
        got = quantized_linear(x, kept, added, tile=tile)
        expected = quantized.quantized_linear(x, kept, added)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert quantized_linear(x[:0], kept, bias, tile=tile).shape == (0, outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_bits_in_every_batch(kind: str) -> None:
    x, kept, bias = case(kind, 30, 200, 70)
    x = (x * 4).round()  # sums are exact, whatever order the interpreter's library adds in
    alone = quantized_linear(x[7:8], kept, bias)
    assert torch.equal(quantized_linear(x, kept, bias)[7:8], alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 20, pytest.param(70, marks=pytest.mark.long)])
def test_every_variant_equals_the_reference_in_bfloat16(kind: str, rows: int) -> None:
    x, kept, bias = case(kind, rows, 96, 48)
    args = x.bfloat16(), kept, bias.bfloat16()
    expected = quantized.quantized_linear(args[0].double(), kept, args[2].double())
    variants = QUANTIZED_LINEAR.variants(*args)
    names = [variant.name for variant in variants]
    assert names[-1] == "torch" and "half" not in names[0]
    assert any("half" in name for name in names) == (kind != "int8")
    assert any("scaled_mm" in name for name in names) == (kind == "w8a8_fp8")
    for out in run_variants(variants, *args):
        assert float((out.double() - expected).norm() / expected.norm()) < 0.006
    # torch's product of float8 refuses 40 outputs.
    refused = QUANTIZED_LINEAR.variants(args[0], case(kind, rows, 96, 40)[1], None)
    assert not any("scaled_mm" in variant.name for variant in refused)


@pytest.mark.parametrize("louder", [1.0, 1e5])
def test_what_float16_cannot_hold_is_multiplied_in_it_all_the_same(louder: float) -> None:
    x, kept, _ = case("fp8", 20, 96, 48)
    loud = (x * louder).bfloat16()
    expected = quantized.quantized_linear(loud.double(), kept)
    with exact_bfloat16():
        got = quantized_linear(loud, kept, half=True).double()
    assert float((got - expected).norm() / expected.norm()) < 0.004
