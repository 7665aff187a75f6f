"""Images in prompts: what the model sees in them takes the place of tokens.

Letters: T packed tokens, H hidden size, P numbers of pixels, C of a patch, S soft tokens.
"""

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.batch import Batch
from diffray.components.image import Sight
from diffray.workers.features.feature import Feature
from diffray.workers.layout import Span

if TYPE_CHECKING:
    from diffray.workers.batch_plan import BatchPlan


class ImageInputs(Feature):
    """The windows within images, also those of chunks, in a model that takes images."""

    fused, replayed = True, False

    @classmethod
    def of(cls, plan: "BatchPlan") -> Self | None:
        sight = plan.model.spec.sight  # chunks with images may join any of the plan's forwards
        return None if sight is None else cls(sight)

    def __init__(self, sight: Sight) -> None:
        self.sight = sight

    def inputs(self, plan: "BatchPlan", x_TH: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        for at, span in zip(plan.layout.offsets, plan.layout.windows, strict=True):
            if span.sequence.images.at(span.start) is not None:
                x_TH[at : at + span.stop - span.start] = self._look(plan, span).to(x_TH)
        return x_TH, batch

    def _look(self, plan: "BatchPlan", span: Span) -> Tensor:
        """Return an image's soft tokens within a window."""
        seen = span.sequence.images.at(span.start)
        assert seen is not None
        pixels_P = torch.frombuffer(bytearray(seen.image.pixels), dtype=torch.float32)
        pixels_PC = send(pixels_P.view(-1, self.sight.patch), plan.device)
        soft_SH = plan.model.look(pixels_PC, seen.image.columns)
        return soft_SH[span.start - seen.start : span.stop - seen.start]
