"""Canvases whose answer is given (teacher forcing), so that the model says how likely it is.

Steps decide positions as they do in any generation, but each gets its given token. What is reported
is that token's log-probability at the step that decided it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffray.components.canvas import Canvas, OpenBlock
from diffray.components.drafted_canvas import DraftedCanvas

_AT_ONCE = 128  # tokens of an autoregressive model that a forward verifies


@dataclass(eq=False)
class GivenCanvas(Canvas):
    """The answer is masks, but for the tokens at some places, which are shown from the start."""

    answer: tuple[int, ...] = field()
    places: frozenset[int]  # in the answer

    @property
    def starts_masked(self) -> bool:
        return not self.places

    def given(self, start: int, stop: int) -> list[int | None]:
        found, first = super().given(start, stop), start - self.prompt_len
        shown = {place - first: self.answer[place] for place in self.places}
        return [shown.get(at, token) for at, token in enumerate(found)]

    def masks(self, start: int, stop: int) -> Tensor:
        return torch.tensor([token is None for token in self.given(start, stop)])


@dataclass(eq=False)
class GivenDrafts(DraftedCanvas):
    """The answer is drafts, all of them right, which causal forwards verify."""

    answer: tuple[int, ...] = field()

    def given(self, start: int, stop: int) -> list[int | None]:
        canvas: list[int | None] = [*self.prompt, *self.answer]
        return canvas[start:stop]

    def block_at(self, index: int) -> OpenBlock:
        block = super().block_at(index)
        drafts = min(self.limit - block.stop, _AT_ONCE) if self.final else 0
        block.masked = torch.arange(block.length + drafts) >= drafts
        block.stop, block.kv_stop = block.stop + drafts, block.kv_stop + drafts
        block.num_drafts = drafts
        return block
