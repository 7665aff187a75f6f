"""Products of integers with matrices in GGUF's blocks, on each kind of processor that runs them."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffray.kernels.cpu import blocks
from diffray.kernels.cpu.program import program
from diffray.kernels.formats import BLOCKS
from diffray.kernels.quantize import Quantized, dequantize, quantize
from diffray.kernels.quantized import quantized_linear, sum_rows

HERE = torch.backends.cpu.get_cpu_capability()
PROCESSORS = [each for each in ("AVX2", "AVX512") if each <= HERE and HERE.startswith("AVX")]

pytestmark = pytest.mark.skipif(not PROCESSORS, reason="this processor has no AVX2")


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Compile for a processor, and for the real one again afterwards."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    program.cache_clear()
    yield request.param
    program.cache_clear()


def matrix(kind: str, rows: int, columns: int) -> Quantized:
    return quantize(torch.randn(rows, columns) + 0.1, BLOCKS[kind])


def rounded(x_TI: Tensor) -> Tensor:
    """Return rows as 8 bits hold them, with a scale for every 32 numbers."""
    blocks_TGB = x_TI.unflatten(1, (-1, 32))
    most_TG1 = blocks_TGB.abs().amax(-1, keepdim=True)
    # As the program computes it; torch's 127 / x would be 127 * (1 / x).
    inverse_TG1 = (torch.tensor(127.0) / most_TG1).nan_to_num(0, 0, 0)
    rounded_TGB: Tensor = (blocks_TGB * inverse_TG1).round() * (most_TG1 / 127)
    return rounded_TGB.flatten(1)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 96), (192, 1536)])
def test_products_are_those_of_rounded_rows(
    processor: str, kind: str, rows: int, columns: int
) -> None:
    kept, x_TI = matrix(kind, rows, columns), torch.randn(61, columns)
    x_TI[3, 32:] *= 1e-3
    x_TI[5] = x_TI[50] = 0
    tiled = blocks.tiled(kept)
    assert tiled.is_tiled and tiled.shape == (rows, columns)
    found = quantized_linear(x_TI, tiled, torch.ones(rows))
    expected = rounded(x_TI).double() @ dequantize(kept, torch.float64).T + 1
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5 * columns**0.5)
    halves = quantized_linear(x_TI.bfloat16(), tiled)
    assert halves.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_and_threads_do_not_affect_each_other(processor: str, kind: str) -> None:
    """Groups of 32, 16, 8, 4, 3, 2 and 1 rows are different code."""
    tiled, x_TI = blocks.tiled(matrix(kind, 320, 256)), torch.randn(63, 256)
    threads = torch.get_num_threads()
    together = quantized_linear(x_TI, tiled)
    for count in (1, 2, 3, 4, 7, 17, 33):
        parts = [quantized_linear(part, tiled) for part in x_TI.split(count)]
        assert torch.equal(torch.cat(parts), together)
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(quantized_linear(x_TI, tiled), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_are_read_from_tiles_as_they_were(processor: str, kind: str) -> None:
    kept = matrix(kind, 64, 96)
    tiled = blocks.tiled(kept)
    index = torch.tensor([5, 63, 0, 5, 17])
    for found, expected in (
        (blocks.read_rows(tiled, slice(None)), kept),
        (blocks.read_rows(tiled, index), kept[index]),
    ):
        assert torch.equal(found.values_EOI, expected.values_EOI)
        assert torch.equal(found.scale_EOG, expected.scale_EOG)
        assert torch.equal(dequantize(found, torch.float32), dequantize(expected, torch.float32))
    shares = torch.randn(3, 64)
    torch.testing.assert_close(sum_rows(shares, tiled), sum_rows(shares, kept))


def test_what_tiles_do_not_hold_stays_as_it_is(processor: str) -> None:
    for kept in (matrix("Q8_0", 40 + 4, 64), quantize(torch.randn(2, 16, 32), BLOCKS["Q4_0"])):
        assert blocks.tiled(kept) is kept


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("no-such-compiler", "no C compiler"), ("false -m64", "non-zero exit status")],
)
def test_without_a_compiler_weights_are_widened(
    compiler: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    program.cache_clear()
    with caplog.at_level(logging.WARNING):
        kept = matrix("Q8_0", 16, 32)
        assert blocks.tiled(kept) is kept
    assert said in caplog.text
    program.cache_clear()


def test_numbers_that_are_none_stay_none(processor: str) -> None:
    """Only in rows that have some; tiny numbers count as 0."""
    tiled, x_TI = blocks.tiled(matrix("Q4_1", 32, 64)), torch.randn(20, 64)
    expected = quantized_linear(x_TI, tiled)
    x_TI[0, 3], x_TI[1, 40] = torch.nan, torch.inf
    found = quantized_linear(torch.cat([x_TI, torch.full((1, 64), 1e-38)]), tiled)
    assert found[:2].isnan().all()
    assert torch.equal(found[2:20], expected[2:]) and not found[20].any()


def test_a_broken_library_in_the_cache_is_replaced(
    processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert program() is not None
    (library,) = tmp_path.rglob("*.so")
    library.unlink()
    library.write_bytes(b"no library")
    program.cache_clear()
    assert program() is not None and library.stat().st_size > 1000
