"""Where the windows of one forward are in the packed batch.

Letters: T packed tokens, S slots, N positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.batch import Batch, Window
from diffray.components.sequence import Sequence
from diffray.workers.graphs import Graphs, Recorded
from diffray.workers.slots import Slots

Span = tuple[Sequence, int, int, int]  # a window of a sequence: start, stop, kv_stop


@dataclass(frozen=True, slots=True)
class Layout:
    """A packed batch, and the canvas cells of its tokens.

    A guided sequence has a second, unconditional window: the same positions of a canvas whose
    prompt and suffix are masked, with K/V of its own.
    """

    windows: list[Span]  # in the order given
    batch: Batch
    masked_prompt_T: Tensor | None  # prompt positions of unconditional windows, replaced by masks
    offsets: tuple[int, ...]  # where each sequence's window starts in T
    uncond_offsets: tuple[int, ...]  # the same for unconditional windows; 0 where there is none
    recorded: Recorded | None = None  # to replay instead of running the batch

    @staticmethod
    def of(windows: list[Span], slots: Slots, page_size: int, graphs: Graphs | None) -> "Layout":
        """Pack each sequence's windows; they often stay the same for many rounds.

        If a recording fits them, they are written into its tensors.
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
        recorded.fill([_window(span, slots) for span in windows])
        length = recorded.bucket.length
        return Layout(
            windows=windows,
            batch=recorded.batch,
            masked_prompt_T=None,
            offsets=tuple(number * length for number in range(len(windows))),
            uncond_offsets=(0,) * len(windows),
            recorded=recorded,
        )

    @staticmethod
    def _pack(windows: list[Span], slots: Slots, page_size: int) -> "Layout":
        parts = [(_window(span, slots), number, False) for number, span in enumerate(windows)]
        guided = [number for number, (sequence, *_) in enumerate(windows) if sequence.guided]
        parts += [(_window(windows[number], slots, uncond=True), number, True) for number in guided]
        parts.sort(key=lambda part: part[0].shape)

        offsets, uncond_offsets, at = [0] * len(windows), [0] * len(windows), 0
        for window, number, is_uncond in parts:
            (uncond_offsets if is_uncond else offsets)[number] = at
            at += window.stop - window.start
        masked_prompt_T = torch.zeros(at, dtype=torch.bool) if guided else None
        for number in guided:
            sequence, start, stop, _ = windows[number]
            positions = torch.arange(start, stop)
            given = (positions < sequence.prompt_len) | (positions >= sequence.blocks_stop)
            assert masked_prompt_T is not None
            masked_prompt_T[uncond_offsets[number] : uncond_offsets[number] + len(given)] = given
        return Layout(
            windows=windows,
            batch=Batch.pack([window for window, _, _ in parts], slots.device, page_size),
            masked_prompt_T=None
            if masked_prompt_T is None
            else send(masked_prompt_T, slots.device),
            offsets=tuple(offsets),
            uncond_offsets=tuple(uncond_offsets),
        )


def _window(span: Span, slots: Slots, *, uncond: bool = False) -> Window:
    sequence, start, stop, kv_stop = span
    pages_P = sequence.uncond_pages_P if uncond else sequence.pages_P
    assert pages_P is not None
    canvas = sequence.slot * slots.length
    return Window(start, stop, kv_stop, sequence.causal_block, pages_P, canvas)
