"""The C programs for forwards of few rows against torch's functions, on each kind of processor."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from diffray.components.batch import Batch, Window
from diffray.kernels import attention, confidence, norm
from diffray.kernels.attention import KVLayer, QKRotary
from diffray.kernels.choose import CPU, TORCH, Kernels
from diffray.kernels.confidence import Draw
from diffray.kernels.cpu import rows
from diffray.kernels.cpu.program import program

PAGE = 8
HERE = torch.backends.cpu.get_cpu_capability()
PROCESSORS = [each for each in ("AVX2", "AVX512") if each <= HERE and HERE.startswith("AVX")]

pytestmark = pytest.mark.skipif(not PROCESSORS, reason="this processor has no AVX2")


@pytest.fixture(params=PROCESSORS, autouse=True)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Compile for a processor, and for the real one again afterwards."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    program.cache_clear()
    yield request.param
    program.cache_clear()


def never(*_: object, **__: object) -> Tensor:
    raise AssertionError("torch's function runs")


def only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's functions fail, so that no test passes by them."""
    functions = (norm, "rms_norm"), (norm, "add_norm"), (attention, "attend")
    for module, name in (*functions, (confidence, "extremes")):
        monkeypatch.setattr(module, name, never)


@pytest.mark.parametrize(("count", "size"), [(1, 16), (5, 576), (1200, 64)])
def test_norms_are_torch_s(count: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, weight = torch.randn(count, size), torch.randn(count, size), torch.randn(size)
    expected = norm.rms_norm(x, weight, 1e-5), *norm.add_norm(x, residual, weight, 1e-5)
    only_here(monkeypatch)
    found = CPU.rms_norm(x, weight, 1e-5), *CPU.add_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(CPU.rms_norm(x[:1], weight, 1e-5), found[0][:1])


@pytest.mark.parametrize("size", [8, 24, 12])
def test_other_shapes_are_torch_s(size: int) -> None:
    """A vector may not fit, rows may be apart, and each head may have a scale of its own."""
    wide = torch.randn(6, 2 * size)
    for x, weight in (
        (wide[:, :size], torch.randn(size)),
        (wide.view(6, 2, size), wide[:2, :size]),
    ):
        expected = norm.rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(rows.rms_norm(x, weight, 1e-6), expected)


# Positions from start to stop, the end of the keys, and the block that ends what a query sees.
Span = tuple[int, int, int, int]
Results = tuple[Tensor, Tensor, Tensor]
WINDOWS = [(0, 3, 3, 1), (20, 21, 21, 1), (17, 21, 21, 1), (8, 16, 16, 4), (30, 38, 45, 0)]
LONG = [(0, 40, 40, 1), (4, 24, 30, 0)]


class Case:
    """Windows of random tokens over pools of keys and values."""

    def __init__(self, windows: list[Span], size: int, *, normed: bool) -> None:
        generator = torch.Generator().manual_seed(size)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.pages_WP = torch.randperm(6 * len(windows), generator=generator).view(-1, 6)
        self.spans = sorted(windows, key=lambda span: (span[1] - span[0], span[2]))
        self.heads = drawn(sum(span[1] - span[0] for span in windows), 10, size)
        self.angles = drawn(2, len(self.heads), 1, size)
        self.norm_ND = drawn(8, size) if normed else None
        self.pools = drawn(2, 6 * len(windows) * PAGE, 2, size)

    def run(self, kernels: Kernels = CPU, *, alone: bool = False) -> Results:
        """Run all windows together, or all queries as windows of one on the same pages."""
        packed = []
        for (start, stop, kv_stop, block), pages in zip(self.spans, self.pages_WP, strict=True):
            inner = range(start, stop) if alone else ()
            packed += [Window(at, at + 1, at + 1, block, pages) for at in inner]
            packed += [] if alone else [Window(start, stop, kv_stop, block, pages)]
        batch = Batch.pack(packed, torch.device("cpu"), PAGE)
        kv, rotary = KVLayer(*self.pools.clone()), QKRotary(self.norm_ND, 1e-5, *self.angles)
        where = batch.slots_T, batch.windows
        return kernels.attend(self.heads.clone(), rotary, kv, *where), *kv


@pytest.mark.parametrize("windows", [WINDOWS[:1], WINDOWS, LONG, WINDOWS + LONG])
@pytest.mark.parametrize(("size", "normed"), [(16, True), (64, False), (128, True), (48, False)])
def test_attention_is_torch_s(
    windows: list[Span],
    size: int,
    normed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(windows, size, normed=normed)
    expected = case.run(TORCH)
    only_here(monkeypatch)
    torch.testing.assert_close(case.run(), expected, rtol=1e-4, atol=2e-5)


def test_a_query_s_bits_depend_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on how many queries its window has, nor on other windows, nor on threads."""
    causal = [(17, 21, 21, 1), (0, 4, 4, 1), (30, 33, 33, 1), (0, 24, 24, 1), (5, 40, 40, 1)]
    case = Case(causal, 64, normed=True)
    together = case.run()
    assert all(map(torch.equal, together, case.run(alone=True)))
    monkeypatch.setattr(rows, "_LITTLE", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert all(map(torch.equal, together, case.run()))
    torch.set_num_threads(before)
    case.spans.append((4, 44, 44, 0))
    case.heads = torch.cat([case.heads, torch.randn(40, 10, 64)])
    case.angles = torch.cat([case.angles, torch.randn(2, 40, 1, 64)], 1)
    case.pages_WP = torch.cat([case.pages_WP, torch.arange(30, 36)[None]])
    case.pools = torch.cat([case.pools, torch.randn(2, 6 * PAGE, 2, 64)], 1)
    assert torch.equal(case.run()[0][: len(together[0])], together[0])


@pytest.mark.parametrize("size", [3, 64, 1003])
@pytest.mark.parametrize("forbidden", [None, 2])
def test_extremes_are_torch_s(
    size: int, forbidden: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest of equal columns is found, in whole vectors and behind them."""
    logits_RV = (torch.randn(20, size) * 2).round()
    logits_RV[0, :], logits_RV[1, 0], logits_RV[2, -1] = 0.0, -torch.inf, 90.0
    expected = confidence.extremes(logits_RV, forbidden)
    before = logits_RV.clone()
    only_here(monkeypatch)
    lse_R, *best = rows.extremes(logits_RV, forbidden)
    torch.testing.assert_close(lse_R, expected.logsumexp_R, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, best, expected[1:]))
    assert torch.equal(logits_RV, before)
    assert torch.equal(rows.extremes(logits_RV[5:6], forbidden).logsumexp_R, lse_R[5:6])


def test_choices_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that draw do not draw the forbidden id either."""
    logits_RV, gather_RK = torch.randn(6, 100), torch.tensor([[12, 90]] * 6)
    logits_RV[:, 12] = 50.0
    number_R = torch.arange(6)
    draw = Draw(torch.tensor([0.0, 1.0] * 3), number_R, number_R, number_R)
    given = logits_RV, 10, 22, gather_RK
    for drawn in (None, draw):
        expected = TORCH.confidence_of_logits(*given, drawn)
        with monkeypatch.context() as patch:
            only_here(patch)
            found = CPU.confidence_of_logits(*given, drawn)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert 22 not in found.ids_R


def test_for_other_devices_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "program", never)
    elsewhere = torch.zeros(4, 32, device="meta")
    assert rows.LowRankSum([(elsewhere, elsewhere, 0)]).inputs == 0
    assert rows.rms_norm(elsewhere, elsewhere[0], 1e-5).is_meta


@pytest.mark.parametrize("exact", [True, False])
def test_low_rank_products_are_torch_s(exact: bool) -> None:
    """Matrices whose numbers bfloat16 holds are read in it."""
    x_TI, y_TO, tokens_A = torch.randn(7, 96), torch.randn(7, 80), torch.tensor([1, 4, 6])
    parts = [
        (torch.randn(5, 96), torch.randn(5, 32), 16),
        (torch.randn(3, 96), torch.randn(3, 16), 64),
    ]
    if exact:
        parts = [(down.bfloat16().float(), up.bfloat16().float(), at) for down, up, at in parts]
    expected = y_TO.clone()
    for down_RI, up_RO, at in parts:
        stop = at + up_RO.shape[1]
        expected[tokens_A, at:stop] += x_TI[tokens_A] @ down_RI.T @ up_RO
    product = rows.LowRankSum(parts)
    assert product.add(y_TO, x_TI, tokens_A)
    torch.testing.assert_close(y_TO, expected, rtol=1e-4, atol=1e-4)
    assert not product.add(y_TO.double(), x_TI.double(), tokens_A)
    assert not product.add(y_TO, x_TI, torch.zeros(600, dtype=torch.long))
    down_RI, up_RO, at = parts[0]
    assert not rows.LowRankSum([(down_RI[:, :90], up_RO, at)]).add(y_TO, x_TI, tokens_A)
