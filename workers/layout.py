"""Where the windows of one forward stand in the packed batch.

Letters: T packed tokens, S slots, N positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffray.components.batch import Batch, Window
from diffray.components.sequence import Sequence
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

    @staticmethod
    def of(windows: list[Span], slots: Slots) -> "Layout":
        """Pack one window of each sequence, and of its twin; windows often stay for many rounds."""
        if slots.layout is None or slots.layout.windows != windows:
            slots.layout = Layout._pack(windows, slots)
        return slots.layout

    @staticmethod
    def _pack(windows: list[Span], slots: Slots) -> "Layout":
        parts: list[tuple[Window, int, bool]] = []
        for number, (sequence, start, stop, kv_stop) in enumerate(windows):
            assert sequence.slots_N is not None
            block = sequence.causal_block
            parts.append((Window(start, stop, kv_stop, block, sequence.slots_N), number, False))
            if sequence.twin_slots_N is not None:
                twin = Window(start, stop, kv_stop, block, sequence.twin_slots_N)
                parts.append((twin, number, True))
        parts.sort(key=lambda part: part[0].shape)

        cells, blank, at = [], [], 0
        offsets, twin_offsets = [0] * len(windows), [0] * len(windows)
        for window, number, is_twin in parts:
            sequence = windows[number][0]
            (twin_offsets if is_twin else offsets)[number] = at
            at += window.stop - window.start
            cells.append(slots.flat(sequence.slot, window.start, window.stop))
            positions = torch.arange(window.start, window.stop)
            given = (positions < sequence.prompt_len) | (positions >= sequence.blocks_stop)
            blank.append(given & is_twin)
        guided = any(is_twin for _, _, is_twin in parts)
        return Layout(
            windows=windows,
            batch=Batch.pack([window for window, _, _ in parts], slots.device),
            cells_T=torch.cat(cells).to(slots.device),
            blank_T=torch.cat(blank).to(slots.device) if guided else None,
            offsets=tuple(offsets),
            twin_offsets=tuple(twin_offsets),
        )
