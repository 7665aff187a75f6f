"""The probability of each slot's whole value on a pinned canvas.

Letters: R rows of the head, E those of slots, S slots, L positions of the longest.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffray.components.logits import Logits


class Values(NamedTuple):
    """Rows of slots on pinned canvases; each slot has one value."""

    rows_E: Tensor
    places_E: Tensor  # flat index into [slots, positions of the longest]
    size: tuple[int, int]
    end_E: Tensor  # the token of unused positions; -1 where there are none
    following_E: Tensor  # the token after the slot

    def probability(self, logits: Logits, logsumexp_R: Tensor, ids_R: Tensor) -> Tensor:
        """Return, for each row of a slot, the probability of the slot's whole value.

        If a value ends before its slot, the token after the slot counts at the value's end.
        """
        following_R = torch.zeros_like(ids_R).index_copy(0, self.rows_E, self.following_E)
        both_R2 = logits.gather(torch.stack([ids_R, following_R], dim=1))
        own_E, after_E = (both_R2 - logsumexp_R.unsqueeze(1))[self.rows_E].unbind(1)
        unused_E = ids_R[self.rows_E] == self.end_E
        unused_SL = self._spread(unused_E)
        later_SL = unused_SL & pad(unused_SL, (1, 0))[:, :-1]
        each_SL = self._spread(torch.where(unused_E, after_E, own_E)).masked_fill(later_SL, 0.0)
        return each_SL.sum(1).exp()[self.places_E // self.size[1]]

    def _spread(self, part_E: Tensor) -> Tensor:
        zero_SL = part_E.new_zeros(self.size)
        return zero_SL.flatten().index_copy(0, self.places_E, part_E).view(self.size)
