"""Sharing of first steps in one forward: which sequences run theirs, and which take it over.

A sequence that takes a step over has no window in the forward: the K/V are copied onto its pages,
and the kept hidden states are appended to those that the forward computes.

Letters: T packed tokens, N positions that the first block's logits come from, H hidden size.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from diffray.components.first_steps import FirstStep, FirstStepKey
from diffray.components.kv_pool import KVPool
from diffray.workers.layout import Layout, Span


@dataclass(slots=True)
class SharedFirstSteps:
    """How the sequences of one forward get their first steps."""

    kv: KVPool
    windows: list[Span]  # of all sequences, in order
    leaders: dict[FirstStepKey, Span] = field(default_factory=dict)  # run their step, and share it
    followers: list[tuple[Span, Span]] = field(default_factory=list)  # each with its leader
    kept: list[tuple[Span, FirstStep]] = field(default_factory=list)  # each with its kept step

    @staticmethod
    def of(kv: KVPool, windows: list[Span], begins: Items[bool]) -> "SharedFirstSteps | None":
        """Plan the first steps of starting sequences, and copy kept K/V; None if none may share."""
        if not kv.first_steps.enabled:
            return None
        found = SharedFirstSteps(kv, [*windows])
        for number, (span, begin) in enumerate(zip(windows, begins, strict=False)):
            key = FirstStepKey.of(span.sequence) if begin else None
            if key is not None:
                found._place(number, span, key)
        return found if found.leaders or found.kept or found.windows != windows else None

    @property
    def run(self) -> list[Span]:
        """The windows of the forward."""
        taken = {span.sequence for span, _ in (*self.followers, *self.kept)}
        return [span for span in self.windows if span.sequence not in taken]

    def within(self, layout: Layout) -> Layout:
        """Return the forward's layout with all windows; shared ones point at the step they use."""
        offset = dict(zip(layout.windows, layout.offsets, strict=True))
        offset |= {span: offset[leader] for span, leader in self.followers}
        behind = len(layout.batch.positions_T)
        for span, step in self.kept:
            offset[span] = behind - step.start
            behind += len(step.hidden_NH)
        offsets = tuple(offset[span] for span in self.windows)
        return replace(layout, windows=self.windows, offsets=offsets)

    def finish(self, hidden_TH: Tensor, layout: Layout) -> Tensor:
        """Share what the forward has computed and stored; return all hidden states."""
        pages: list[int] = []
        onto: list[int] = []
        for span, leader in self.followers:
            pages += leader.sequence.kv.pages
            onto += span.sequence.kv.pages
        for key, span in self.leaders.items():
            count = len(span.sequence.kv.pages)
            if count <= self.kv.num_free:
                first, (start, stop, _) = layout.offset_of(span), key.read
                own_NH = hidden_TH[first + start : first + stop].clone()
                step = FirstStep(self.kv.allocate(count), start, own_NH)
                pages += span.sequence.kv.pages
                onto += step.pages
                self.kv.first_steps.keep(key, step)
        if pages:
            self.kv.copy(pages, onto)
        return torch.cat([hidden_TH, *(step.hidden_NH for _, step in self.kept)])

    def _place(self, number: int, span: Span, key: FirstStepKey) -> None:
        """Let a sequence at its first step take one over, or run its own."""
        sequence, cached = span.sequence, 0
        if key in self.leaders:
            self.followers.append((span, self.leaders[key]))
            cached = sequence.canvas.prompt_len
        elif (step := self.kv.first_steps.find(key)) is not None:
            self.kept.append((span, step))
            self.kv.copy(step.pages, sequence.kv.pages)
            cached = sequence.canvas.prompt_len
        elif not sequence.canvas.answer and (pages := self.kv.first_steps.alike(key)):
            self.kv.copy(pages, sequence.kv.pages[: len(pages)])
            cached, sequence.kv.approximate = len(pages) * self.kv.page_size, True
            self.windows[number] = span._replace(start=cached)
        else:
            self.leaders[key] = span
        if not sequence.forwards:
            sequence.kv.cached = cached
