"""Where the windows of one forward stand in the packed batch.

Letters: T packed tokens, S slots, N positions.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from diffray.components.batch import Batch, Window
from diffray.components.sequence import Sequence
from diffray.workers.graphs import Graphs, Recorded
from diffray.workers.slots import Slots

Span = tuple[Sequence, int, int, int]  # a window of a sequence: start, stop, kv_stop


@dataclass(frozen=True, slots=True)
class Layout:
    """A packed batch, and which canvas cells its tokens are.

    A guided sequence has a second window, its twin: the same positions of a canvas whose prompt and
    suffix are masked, with K/V of its own.
    """

    windows: list[Span]  # in the order given
    batch: Batch
    cells_T: Tensor  # flat index into the slots
    blank_T: Tensor | None  # given positions of twins, shown to the model as masks
    offsets: tuple[int, ...]  # where each sequence's window begins in T
    twin_offsets: tuple[int, ...]  # the same for the twins; 0 where there is none
    recorded: Recorded | None = None  # what to replay instead of running the batch

    @staticmethod
    def of(windows: list[Span], slots: Slots, page_size: int, graphs: Graphs | None) -> "Layout":
        """Pack one window of each sequence, and of its twin; windows often stay for many rounds.

        Where a recording fits them, they are laid out in its tensors.
        """
        if slots.layout is None or slots.layout.windows != windows:
            recorded = None
            if graphs is not None and not any(sequence.guided for sequence, *_ in windows):
                longest = max(stop - start for _, start, stop, _ in windows)
                recorded = graphs.fit(len(windows), longest)
            if recorded is None:
                slots.layout = Layout._pack(windows, slots, page_size)
            else:
                slots.layout = Layout._fill(windows, slots, recorded)
        return slots.layout

    @staticmethod
    def _fill(windows: list[Span], slots: Slots, recorded: Recorded) -> "Layout":
        own = [_window(span) for span in windows]
        recorded.fill(own, [_cells(span, slots) for span in windows])
        length = recorded.bucket.length
        return Layout(
            windows=windows,
            batch=recorded.batch,
            cells_T=recorded.cells_T,
            blank_T=None,
            offsets=tuple(number * length for number in range(len(windows))),
            twin_offsets=(0,) * len(windows),
            recorded=recorded,
        )

    @staticmethod
    def _pack(windows: list[Span], slots: Slots, page_size: int) -> "Layout":
        parts: list[tuple[Window, int, bool]] = []
        for number, span in enumerate(windows):
            parts.append((_window(span), number, False))
            if span[0].twin_slots_N is not None:
                parts.append((_window(span, twin=True), number, True))
        parts.sort(key=lambda part: part[0].shape)

        cells, blank = [], []
        offsets, twin_offsets = [0] * len(windows), [0] * len(windows)
        starts = accumulate((window.stop - window.start for window, *_ in parts), initial=0)
        for at, (window, number, is_twin) in zip(starts, parts, strict=False):
            sequence = windows[number][0]
            (twin_offsets if is_twin else offsets)[number] = at
            cells.append(_cells(windows[number], slots))
            positions = torch.arange(window.start, window.stop)
            given = (positions < sequence.prompt_len) | (positions >= sequence.blocks_stop)
            blank.append(given & is_twin)
        guided = any(is_twin for _, _, is_twin in parts)
        return Layout(
            windows=windows,
            batch=Batch.pack([window for window, _, _ in parts], slots.device, page_size),
            cells_T=torch.cat(cells).to(slots.device),
            blank_T=torch.cat(blank).to(slots.device) if guided else None,
            offsets=tuple(offsets),
            twin_offsets=tuple(twin_offsets),
        )


def _window(span: Span, *, twin: bool = False) -> Window:
    sequence, start, stop, kv_stop = span
    slots_N = sequence.twin_slots_N if twin else sequence.slots_N
    assert slots_N is not None
    return Window(start, stop, kv_stop, sequence.causal_block, slots_N)


def _cells(span: Span, slots: Slots) -> Tensor:
    sequence, start, stop, _ = span
    return slots.flat(sequence.slot, start, stop)
