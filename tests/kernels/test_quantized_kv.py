"""Keys and values in few bits: how far rounding moves them, and who reads what."""

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.helpers.triton_device import DEVICE  # isort: skip
from diffray.components.batch import Batch, Window
from diffray.kernels import quantized_kv as reference
from diffray.kernels.attention import QKRotary
from diffray.kernels.formats import KV_FORMATS, Format
from diffray.kernels.quantized_kv import QuantizedKV, round_heads, widen_heads
from diffray.kernels.triton.quantized_kv import quantized_attend

INT8, UINT4 = KV_FORMATS["int8"], KV_FORMATS["uint4"]
FORMS = pytest.mark.parametrize("form", [INT8, UINT4], ids=["int8", "uint4"])
PAGE = 8


def heads_of(shape: tuple[int, ...], seed: int, size: float, offset: float) -> Tensor:
    """Return heads of which one number is an outlier and one head is constant."""
    draw = torch.Generator().manual_seed(seed)
    heads = torch.randn(shape, generator=draw) * size + offset
    heads[0, 0, seed % shape[-1]] *= 50
    heads[-1, -1] = offset
    return heads


@FORMS
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    groups=st.integers(1, 4),
    size=st.sampled_from([1e-20, 1e-3, 1.0, 300.0, 1e30]),
    offset=st.sampled_from([0.0, -1e-3, 5.0, -4096.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_no_number_moves_by_more_than_half_a_scale(
    form: Format, seed: int, groups: int, size: float, offset: float, dtype: torch.dtype
) -> None:
    heads = heads_of((5, 3, 32 * groups), seed, size, offset).to(dtype)
    kept = round_heads(heads, form)
    scale, low = kept.pairs_NP2.double().unbind(-1)
    wide = heads.double().unflatten(-1, (scale.shape[-1], -1))
    found = widen_heads(kept, form, torch.float64).unflatten(-1, (scale.shape[-1], -1))
    # Beside it what float32 leaves out of numbers as large as these.
    float32 = wide.abs().amax(-1) * 2.0**-22
    moved = (found - wide).abs().amax(-1)
    assert (moved <= scale * (0.5 + 1e-3) + float32).all()
    # The scale is that of the numbers' range, but for what bfloat16 adds to it.
    span = wide.amax(-1) - wide.amin(-1)
    most = (span + wide.amin(-1).abs() * 2.0**-7) / form.largest * (1 + 2.0**-7)
    assert (scale <= most + 1.01e-12).all()
    assert (low <= wide.amin(-1)).all()


@FORMS
def test_a_head_is_rounded_alike_in_whatever_company(form: Format) -> None:
    heads = heads_of((7, 4, 64), 3, 2.0, 0.5)
    together = round_heads(heads, form)
    for at in product(range(7), range(4)):
        alone = round_heads(heads[at].unsqueeze(0), form)
        for one, every in zip(alone, together, strict=True):
            assert torch.equal(one[0], every[at])


def test_scales_belong_to_heads_or_to_32_numbers_of_them() -> None:
    heads = torch.ones(1, 2, 64)
    heads[0, 0, 0] = 1000.0
    wide = widen_heads(round_heads(heads, UINT4), UINT4, torch.float32)
    assert torch.equal(wide[0, 0, 32:], heads[0, 0, 32:]) and torch.equal(wide[0, 1], heads[0, 1])
    assert [part.shape for part in round_heads(heads, INT8)] == [(1, 2, 64), (1, 2, 1, 2)]
    assert [part.shape for part in round_heads(heads, UINT4)] == [(1, 2, 32), (1, 2, 2, 2)]


# start, stop, kv_stop, block, open: blocks of 8, a window in the middle, prompts, whole canvases
SPANS = [
    (8, 16, 24, 8, 0),
    (8, 24, 24, 8, 16),
    (0, 16, 16, 8, 16),
    (5, 9, 30, 0, 0),
    (0, 9, 9, 0, 0),
]


def case(form: Format, size: int) -> tuple[Batch, Tensor, QKRotary, QuantizedKV]:
    """Return windows, the heads of their tokens, and a pool in which something stands."""
    torch.manual_seed(size)
    pages = (torch.randperm(4 * len(SPANS)) + 1).view(len(SPANS), 4)
    windows = [Window(*s[:4], pages_P, 0, s[4]) for s, pages_P in zip(SPANS, pages, strict=True)]
    batch = Batch.pack(sorted(windows, key=lambda w: w.shape), DEVICE, PAGE)
    tokens, slots = len(batch.positions_T), (pages.numel() + 1) * PAGE
    keys, values = torch.randn(2, slots, 2, size, device=DEVICE)
    cos_T1R = torch.ones(tokens, 1, size, device=DEVICE)
    rotary = QKRotary(None, 1e-5, cos_T1R, torch.zeros_like(cos_T1R))
    heads_TND = torch.randn(tokens, 4 + 2 * 2, size, device=DEVICE)
    kv = QuantizedKV(form, *(round_heads(x, form) for x in (keys, values)))
    return batch, heads_TND, rotary, kv


@pytest.mark.parametrize(("form", "size"), [(INT8, 24), (UINT4, 64)], ids=["int8", "uint4"])
def test_a_window_reads_its_own_open_positions_as_they_came(form: Format, size: int) -> None:
    """All others as pages keep them: those that the same forward has stored, too."""
    batch, heads_TND, rotary, kv = case(form, size)
    found = reference.quantized_attend(heads_TND, rotary, kv, batch.slots_T, batch.windows)
    q_TQD, own_k, own_v = heads_TND.split([4, 2, 2], dim=1)
    pool_k, pool_v = (widen_heads(kept, form, torch.float32) for kept in (kv.keys, kv.values))
    paged = batch.windows.paged
    for w, (first, last) in enumerate(zip(paged.first_W[:-1], paged.first_W[1:], strict=True)):
        start, stop, opening = paged.start_W[w], paged.kv_stop_W[w], paged.open_W[w]
        at = torch.arange(int(stop), device=DEVICE)
        slots = paged.pages_WP[w, at // PAGE].long() * PAGE + at % PAGE
        k, v = pool_k[slots].clone(), pool_v[slots].clone()
        own = slice(int(first + opening - start), int(last))
        for pool, came in ((k, own_k), (v, own_v)):
            pool[int(opening) : int(opening) + own.stop - own.start] = came[own]
        queries = torch.arange(int(last - first), device=DEVICE) + start
        block = int(paged.block_W[w])
        ends = (queries // block + 1) * block if block else torch.full_like(queries, int(stop))
        read = scaled_dot_product_attention(
            q_TQD[first:last].transpose(0, 1),
            k.repeat_interleave(2, 1).transpose(0, 1),
            v.repeat_interleave(2, 1).transpose(0, 1),
            attn_mask=at < ends.unsqueeze(1),
        )
        torch.testing.assert_close(found[first:last], read.transpose(0, 1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("form", "size", "split_keys"),
    [(INT8, 24, 256), (INT8, 128, 256), (UINT4, 64, 256), (UINT4, 96, 256), (UINT4, 32, 8)],
    ids=str,
)
@pytest.mark.rotate(2)
def test_triton_s_attention_equals_torch_s(form: Format, size: int, split_keys: int) -> None:
    found = []
    for attend in (reference.quantized_attend, partial(quantized_attend, split_keys=split_keys)):
        batch, heads_TND, rotary, kv = case(form, size)
        read = attend(heads_TND, rotary, kv, batch.slots_T, batch.windows)
        found.append([read, *kv.keys, *kv.values])
    (read, *kept), (expected, *others) = found[1], found[0]
    torch.testing.assert_close(read, expected, atol=1e-5, rtol=1e-4)
    if DEVICE.type == "cpu":  # a GPU may round one number of two near ones otherwise
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept, others, strict=True))
