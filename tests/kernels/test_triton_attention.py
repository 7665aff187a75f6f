"""Attention over the page table in Triton against torch."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import DEVICE  # isort: skip
from diffray.components.batch import Batch, Window
from diffray.kernels import attention as reference
from diffray.kernels.attention import window_attention
from diffray.kernels.triton.attention import num_splits, paged_attention
from diffray.kernels.windows import PagedWindows

PAGE = 8


class Span(NamedTuple):
    """A window: its positions, the end of its keys, and its block length."""

    start: int
    stop: int
    kv_stop: int
    block: int = 0


def place(spans: list[Span], padding: int = 0) -> tuple[PagedWindows, int]:
    """Give each span pages of its own, in no order; add empty windows at the end."""
    widest = max(-(-span.kv_stop // PAGE) for span in spans)
    free = torch.randperm(widest * len(spans)) + 1
    pages = torch.zeros(len(spans) + padding, widest, dtype=torch.int32)
    pages[: len(spans)] = free.view(len(spans), widest).int()
    lengths = [span.stop - span.start for span in spans] + [0] * padding
    spans = spans + [Span(0, 0, 0)] * padding
    starts, ends, stops, blocks = torch.tensor(spans, dtype=torch.int32).to(DEVICE).unbind(1)
    firsts = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    starts, ends, stops, blocks = (each.contiguous() for each in (starts, ends, stops, blocks))
    windows = PagedWindows(
        firsts, starts, stops, blocks, starts, ends, pages.to(DEVICE), PAGE, max(lengths)
    )
    return windows, int(pages.max()) + 1


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def tensors(
    windows: PagedWindows, pages: int, heads: int, keys: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(size)
    q = torch.randn(int(windows.first_W[-1]), heads, size, device=DEVICE)
    pools = torch.randn(2, pages * PAGE, keys, size, device=DEVICE)
    return q, pools[0], pools[1]


CUT = Span(600, 610, 700), Span(0, 3, 40)  # windows whose keys several programs share
IN_BLOCKS = [span._replace(block=32) for span in CUT]


@pytest.mark.parametrize(
    ("heads", "keys", "size", "spans", "split_keys", "splits"),
    [
        *(
            (*sizes, spans, 256, 1)
            for sizes in [(2, 2, 16), (6, 2, 24), (4, 1, 40)]
            for spans in [
                [Span(0, 5, 5)],
                [Span(10, 23, 41), Span(0, 9, 9), Span(3, 4, 70)],
                [Span(8, 20, 20, 8), Span(0, 37, 37, 16), Span(16, 20, 20, 4)],
                [Span(0, 30, 27, 7), Span(2, 12, 33)],
            ]
        ),
        *(
            (2, 1, 16, spans, *split)
            for spans in (CUT, IN_BLOCKS)
            for split in [(256, 2), (128, 5), (64, 11)]
        ),
    ],
)
@pytest.mark.rotate(6)
def test_attention_equals_the_reference(
    heads: int, keys: int, size: int, spans: list[Span], split_keys: int, splits: int
) -> None:
    torch.manual_seed(0)
    windows, pages = place([*spans], padding=splits > 1)
    most_keys = windows.pages_WP.shape[1] * PAGE
    assert num_splits(len(windows.start_W), most_keys, split_keys) == splits
    args = tensors(windows, pages, heads, keys, size)
    found = paged_attention(*args, windows, split_keys=split_keys)
    close(found, reference.paged_attention(*args, windows))


def test_padding_changes_nothing_and_what_no_query_sees_is_not_read() -> None:
    torch.manual_seed(0)
    spans = [Span(4, 9, 19), Span(0, 6, 6, 3)]
    bare, pages = place(spans)
    q, k, v = tensors(bare, pages, 2, 2, 16)
    expected = reference.paged_attention(q, k, v, bare)
    pad = torch.nn.functional.pad
    wide = bare._replace(
        first_W=torch.cat([bare.first_W, bare.first_W[-1:].expand(2)]),
        start_W=pad(bare.start_W, (0, 2)),
        kv_stop_W=pad(bare.kv_stop_W, (0, 2)),
        block_W=pad(bare.block_W, (0, 2)),
        pages_WP=pad(bare.pages_WP, (0, 3, 0, 2)),
        max_queries=40,
    )
    k[:PAGE] = v[:PAGE] = torch.nan
    last = int(bare.pages_WP[0, 2]) * PAGE  # positions 16 to 23, of which 19 and up are unseen
    k[last + 3 : last + PAGE] = v[last + 3 : last + PAGE] = torch.nan
    close(paged_attention(q, k, v, wide), expected)


def test_windows_mean_what_the_model_means_by_them() -> None:
    torch.manual_seed(0)
    spans = [Span(8, 16, 24, 8), Span(8, 16, 24, 8), Span(0, 16, 16, 8), Span(5, 9, 30)]
    paged, pages = place(spans)
    q, keys, values = tensors(paged, pages, 4, 2, 16)
    tables = paged.pages_WP.long().cpu()
    batch = Batch.pack([Window(*s, n) for s, n in zip(spans, tables, strict=True)], DEVICE, PAGE)
    own_k, own_v = keys[batch.slots_T], values[batch.slots_T]
    expected = window_attention(q, own_k, own_v, keys, values, batch.windows.groups)
    slots = (tables.unsqueeze(2) * PAGE + torch.arange(PAGE)).flatten(1)
    single = [Window(*s, n) for s, n in zip(spans, slots, strict=True)]
    bare = Batch.pack(single, DEVICE, 1)  # the same places as pages of one slot each
    for form in (paged, batch.windows.paged, bare.windows.paged):
        assert all(part.data_ptr() % 16 == 0 for part in form[:7])
        close(paged_attention(q, keys, values, form), expected)
