"""Formats of weights: how far a weight moves at most, and that parts are parts of the whole."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffray.kernels import quantized
from diffray.kernels.formats import FORMATS, Format
from diffray.kernels.linear import unpack
from diffray.kernels.quantize import (
    Quantized,
    dequantize,
    float8_rows,
    pack_nibbles,
    quantize,
    quantize_rows,
    round_rows,
)
from diffray.kernels.quantized import (
    integer_product,
    multiplies_bytes,
    pack_bytes,
    quantized_linear,
)

WIDTH = 512  # a multiple of every group


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Rows of all magnitudes: some one-sided, some of one outlier, some of zeros."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    rows = draw(st.integers(1, 5))
    w = torch.randn(rows, WIDTH) * 10.0 ** draw(st.integers(-6, 6))
    shape = draw(st.sampled_from(["plain", "positive", "outlier", "zeros", "constant", "offset"]))
    if shape == "positive":
        w = w.abs()
    elif shape == "outlier":
        w[:, draw(st.integers(0, WIDTH - 1))] *= 1000
    elif shape == "zeros":
        w[0] = 0
    elif shape == "constant":
        w = w[:, :1].expand(-1, WIDTH).clone()
    elif shape == "offset":
        w = w + w.abs().max() * 3
    return w


# Those of blocks are tested with GGUF's files.
PLAIN = {name: form for name, form in FORMATS.items() if not form.in_blocks}


def steps(kept: Quantized) -> Tensor:
    """Return the distance between neighbouring numbers at each weight [O, I]."""
    group = kept.shape[-1] // kept.scale_EOG.shape[-1]
    return kept.scale_EOG.repeat_interleave(group, dim=-1).double()


@pytest.mark.parametrize("form", PLAIN.values(), ids=PLAIN.keys())
@given(w=matrices())
@settings(max_examples=25, deadline=None)
def test_no_weight_moves_by_more_than_half_a_step(form: Format, w: Tensor) -> None:
    """And zero stays zero."""
    w[:, 3] = 0
    kept = quantize(w, form)
    found = dequantize(kept, torch.float64)
    assert not found[:, 3].any()
    error = (found - w.double()).abs()
    if form.is_float8:  # three bits behind the point; below 2**-6 the step is fixed
        bound = torch.maximum(w.double().abs() / 16, steps(kept) * 2.0**-10)
    else:
        bound = steps(kept) / 2
    assert bool((error <= bound * (1 + 1e-4) + 1e-15).all())


@pytest.mark.parametrize("form", PLAIN.values(), ids=PLAIN.keys())
def test_a_part_is_the_part_of_the_whole(form: Format) -> None:
    """Rows and experts anywhere; columns at groups. A matrix takes its bits and its scales."""
    torch.manual_seed(0)
    w = torch.randn(3, 6, 2 * WIDTH)
    kept = quantize(w, form)
    assert kept.shape == w.shape
    scales = 3 * 6 * form.scales_of(2 * WIDTH)
    assert kept.nbytes == w.numel() * form.bits // 8 + scales * (5 if form.has_zero else 4)

    def wide(kept: Quantized) -> Tensor:
        return dequantize(kept, torch.float32)

    whole = wide(kept)
    for index in (1, slice(1, 3), (slice(0, 2), slice(2, 5))):
        assert torch.equal(wide(kept[index]), whole[index])
    assert torch.equal(wide(kept.between(WIDTH, 2 * WIDTH)), whole[..., WIDTH:])
    assert torch.equal(torch.cat([*map(wide, kept.chunk(2, dim=1))], dim=1), whole)
    alone = [wide(quantize(each, form)) for each in w]
    assert torch.equal(torch.stack(alone), whole)


def test_of_two_nibbles_the_first_is_the_lower() -> None:
    """That all come back is what their formats' other tests are about."""
    assert pack_nibbles(torch.tensor([[1, 2]], dtype=torch.uint8)).tolist() == [[0x21]]


def test_every_float8_is_widened_exactly() -> None:
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()].view(1, -1)
    kept = Quantized(FORMATS["fp8"], numbers, torch.ones(1, 1), None)
    assert torch.equal(dequantize(kept, torch.float32), numbers.float())


@pytest.mark.parametrize("has_unit", {False, multiplies_bytes()})
@pytest.mark.parametrize("columns", [8, 1000, 1024, 1025, 2001, 5000])
def test_sums_of_bytes_are_exact(
    columns: int, has_unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a unit for bytes, even where all are as large as they can be."""
    monkeypatch.setattr(quantized, "multiplies_bytes", lambda: has_unit)
    torch.manual_seed(columns)
    x = torch.randint(-127, 128, (70, columns), dtype=torch.int8)
    w = torch.randint(-127, 128, (40, columns), dtype=torch.int8)
    x[0], w[0], x[1] = 127, 127, -127
    assert torch.equal(integer_product(x, w).long(), x.long() @ w.long().t())


@pytest.mark.skipif(not multiplies_bytes(), reason="this CPU has no unit for bytes")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(70, 200), (33, 5000), (3, 7), (1, 1)])
@pytest.mark.rotate(6)
def test_packed_bytes_multiply_like_plain_ones_bit_for_bit(
    shape: tuple[int, int], dtype: torch.dtype, threads: int
) -> None:
    """Alone and in any batch; also where sums are too large to be exact in float32."""
    torch.manual_seed(0)
    kept = quantize(torch.randn(shape), FORMATS["w8a8"])
    kept.values_EOI[0] = 127
    packed = replace(kept, values_EOI=pack_bytes(kept.values_EOI))
    assert packed.values_EOI.is_mkldnn and packed.shape == shape
    assert torch.equal(unpack(packed.values_EOI), kept.values_EOI)
    x = (torch.randn(300, shape[1]) * torch.rand(300, 1) * 50).to(dtype)
    x[0], x[1], x[2] = 3, -3, 0
    bias = torch.randn(shape[0]).to(dtype)
    plain = quantized_linear(x, kept, bias)
    parts = [slice(rows) for rows in (*range(36), 63, 64, 65, 96, 100, 128, 255, 300)]
    parts += [slice(row, row + 1) for row in range(0, 300, 7)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for part in parts:
            assert torch.equal(quantized_linear(x[part], packed, bias), plain[part])
    finally:
        torch.set_num_threads(before)


def test_without_a_unit_bytes_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products would saturate."""
    monkeypatch.setattr(quantized, "multiplies_bytes", lambda: False)
    values = torch.ones(4, 8, dtype=torch.int8)
    assert pack_bytes(values) is values


@pytest.mark.parametrize(("kind", "dtype"), [("w8a8", "float32"), ("w8a8_fp8", "float64")])
@given(rows=st.integers(1, 100), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit(
    kind: str, dtype: str, rows: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(rows, 200) * torch.rand(rows, 1) * 50).to(getattr(torch, dtype))
    kept = quantize(torch.randn(70, 200), FORMATS[kind])
    bias = torch.randn(70).to(x.dtype)
    together = quantized_linear(x, kept, bias)
    number = seed % rows
    assert torch.equal(quantized_linear(x[number : number + 1], kept, bias)[0], together[number])


@pytest.mark.parametrize("kind", ["w8a8", "w8a8_fp8"])
@given(seed=st.integers(0, 1000), power=st.integers(-5, 5))
@settings(max_examples=25, deadline=None)
def test_products_are_those_of_what_both_are_rounded_to(kind: str, seed: int, power: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 128, dtype=torch.float64) * 10.0**power
    kept = quantize(torch.randn(16, 128, dtype=torch.float64), FORMATS[kind])
    found = quantized_linear(x, kept)
    if kind == "w8a8":
        numbers, scale = quantize_rows(x)
        rounded = numbers.double() * scale
        assert bool(((rounded - x).abs() <= scale / 2 * (1 + 1e-6)).all())
    else:
        rounded = round_rows(x)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            narrow = x.to(dtype)
            ours = quantized_linear(narrow, kept).double()
            theirs = quantized_linear(narrow.double(), kept)
            assert float((ours - theirs).norm() / theirs.norm()) < tolerance
    torch.testing.assert_close(found, rounded @ dequantize(kept, torch.float64).t())


@given(w=matrices(), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@settings(max_examples=50, deadline=None)
def test_a_float8_activation_moves_by_a_sixteenth_at_most(w: Tensor, dtype: torch.dtype) -> None:
    """Or by half a step of the least numbers; scales are the least powers of 2 that fit."""
    x = w.to(dtype)
    numbers, scale = float8_rows(x)
    found = round_rows(x)
    assert found.dtype == dtype and numbers.dtype == torch.float8_e4m3fn
    assert torch.equal(found.double(), numbers.double() * scale.double())
    error = (found.double() - x.double()).abs()
    bound = torch.maximum(x.double().abs() / 16, scale.double() * 2.0**-10)
    assert bool((error <= bound).all())
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))
    largest = x.float().abs().amax(1, keepdim=True)
    assert bool((largest <= 448 * scale).all())
    assert bool(((largest > 224 * scale) | (largest < 1e-12)).all())
    assert torch.equal(round_rows(found), found)


def test_float16_s_largest_activations_do_not_overflow_float8_products() -> None:
    x = torch.full((2, 512), 192.0, dtype=torch.float16)
    kept = quantize(torch.full((3, 512), 0.25), FORMATS["w8a8_fp8"])
    assert quantized_linear(x, kept).tolist() == [[192 * 0.25 * 512] * 3] * 2


@pytest.mark.parametrize("form", [f for f in FORMATS.values() if not f.rounds_inputs])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_are_those_of_the_widened_matrix(form: Format, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, WIDTH).to(dtype)
    bias = torch.randn(3000).to(dtype)
    kept = quantize(torch.randn(3000, WIDTH), form)  # more rows than are widened at a time
    expected = torch.nn.functional.linear(x, dequantize(kept, dtype), bias)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.5}[dtype]
    torch.testing.assert_close(quantized_linear(x, kept, bias), expected, rtol=1e-2, atol=tolerance)
