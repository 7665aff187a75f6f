"""Where the windows of one forward are in the packed batch."""

from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch

from diffray.components.backend import send
from diffray.components.batch import Batch, Window
from diffray.components.copies import Copy
from diffray.components.lora import LoRA
from diffray.components.low_rank import Adapted
from diffray.components.sequence import Sequence
from diffray.workers.graphs import Graphs, Recorded
from diffray.workers.slots import Slots

# Of each window: where its sequence's block starts, and whether its next step verifies drafts.
Blocks = list[tuple[int, bool]]


class Span(NamedTuple):
    """A window of a sequence, or of a copy of it."""

    sequence: Sequence
    start: int
    stop: int
    kv_stop: int
    copy: Copy | None = None


def spans_of(sequence: Sequence, start: int, stop: int) -> list[Span]:
    """Return the windows that store the K/V of the final positions [start, stop)."""
    return [Span(sequence, *piece, piece[1]) for piece in sequence.pieces(start, stop)]


@dataclass(frozen=True, slots=True)
class Layout:
    """A packed batch, and where each window is in it."""

    windows: list[Span]  # in the order given
    batch: Batch
    offsets: tuple[int, ...]  # the packed token at which each window starts
    blocks: Blocks
    recorded: Recorded | None = None  # to replay instead of running the batch

    @staticmethod
    def of(windows: list[Span], slots: Slots, page_size: int, graphs: Graphs | None) -> "Layout":
        """Pack windows, or keep the last layout, as windows often stay the same for many rounds.

        If a recording fits the windows, they are written into its tensors.
        """
        blocks = [(block.start, block.verifies) for block in (w.sequence.block for w in windows)]
        last = slots.layout
        if last is None or last.windows != windows or last.blocks != blocks:
            recorded = None
            if graphs is not None and not _any_adapted(windows):
                longest = max(span.stop - span.start for span in windows)
                recorded = graphs.fit(len(windows), longest)
            if recorded is None:
                last = Layout._pack(windows, blocks, slots, page_size)
            else:
                last = Layout._fill(windows, blocks, slots, recorded)
            slots.layout = last
        return last

    @staticmethod
    def _fill(windows: list[Span], blocks: Blocks, slots: Slots, recorded: Recorded) -> "Layout":
        recorded.fill([_window(span, slots) for span in windows])
        length = recorded.bucket.length
        return Layout(
            windows=windows,
            batch=recorded.batch,
            offsets=tuple(number * length for number in range(len(windows))),
            blocks=blocks,
            recorded=recorded,
        )

    @staticmethod
    def _pack(windows: list[Span], blocks: Blocks, slots: Slots, page_size: int) -> "Layout":
        parts = [(_window(span, slots), number) for number, span in enumerate(windows)]
        parts.sort(key=lambda part: part[0].shape)
        offsets, at = [0] * len(windows), 0
        for window, number in parts:
            offsets[number] = at
            at += window.stop - window.start
        packed = Batch.pack([window for window, _ in parts], slots.device, page_size)
        if _any_adapted(windows):
            packed = replace(packed, adapted=_adapted(windows, offsets, slots.device))
        return Layout(windows=windows, batch=packed, offsets=tuple(offsets), blocks=blocks)

    def offset_of(self, span: Span) -> int:
        """Return the packed token at which a window starts."""
        return self.offsets[self.windows.index(span)]


def _any_adapted(windows: list[Span]) -> bool:
    return any(span.sequence.lora or span.sequence.drafter for span in windows)


def _adapted(windows: list[Span], offsets: list[int], device: torch.device) -> tuple[Adapted, ...]:
    """Return the packed tokens of each adapter's windows."""
    found: dict[LoRA, list[range]] = {}
    for span, at in zip(windows, offsets, strict=True):
        for lora, own in span.sequence.adapters(span.start, span.stop):
            first = at - span.start + own.start
            found.setdefault(lora, []).append(range(first, first + len(own)))
    return tuple(
        Adapted(lora, send(torch.tensor([*chain(*parts)]), device), _joined(parts))
        for lora, parts in found.items()
    )


def _joined(parts: list[range]) -> slice | None:
    """Return the ranges as one; None if there are gaps between them."""
    whole = slice(min(each.start for each in parts), max(each.stop for each in parts))
    return whole if whole.stop - whole.start == sum(map(len, parts)) else None


def _window(span: Span, slots: Slots) -> Window:
    sequence = span.sequence
    slot, pages_P = sequence.slot, sequence.kv.pages_P
    if span.copy is not None:
        slot, pages_P = span.copy.slot, span.copy.pages_P
    assert pages_P is not None
    causal = sequence.causal_at(span.start)
    # Positions before the block are final, on pages that may be shared, so they are read as stored.
    block = sequence.block
    first_open = block.stop if block.verifies else block.start
    first_open = first_open if sequence.policy.cache.keeps_prefix else 0
    cell = slot * slots.length
    return Window(span.start, span.stop, span.kv_stop, causal, pages_P, cell, first_open)
