"""The rule that replaces keyed noise in DiffusionGemma's golden cases.

Letters: R rows, V token ids.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from diffray.components.logits import Logits
from diffray.kernels import noise

_LOW = 0xFFFFFFFF
_IDS, _DRAWS = 17, 99991  # salts


class MixRule:
    """Computes random tokens and draws from a canvas, its step, and the position in it.

    A request's seed is its case's number, from which the places of its canvases follow.
    """

    def __init__(self, cases: Mapping[int, dict[str, Any]]) -> None:
        self.cases = cases
        self._first: dict[tuple[int, int], int] = {}  # the first step of each canvas

    def token_ids(
        self, seed_R: Tensor, position_R: Tensor, step_R: Tensor, vocab_size: int
    ) -> Tensor:
        return self._mixed((seed_R, position_R, step_R), _IDS) % vocab_size

    def draw(self, logits: Logits, key: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the first token at which the cumulated probability exceeds a uniform number."""
        uniform_R = (self._mixed(key, _DRAWS).double() + 0.5) / 2**32
        sums_RV = logits.values_RV.float().softmax(-1).double().cumsum(-1)
        return (sums_RV > (uniform_R * sums_RV[:, -1]).unsqueeze(1)).int().argmax(-1)

    def _mixed(self, key: tuple[Tensor, Tensor, Tensor], salt: int) -> Tensor:
        mixed = [_mix(*self._place(*row), salt) for row in torch.stack(key, 1).tolist()]
        return torch.tensor(mixed)

    def _place(self, seed: int, position: int, step: int) -> tuple[int, int, int]:
        case = self.cases[seed]
        canvas, place = divmod(position - len(case["prompt"]), case["block_length"])
        if step < 0:  # before the first step
            return canvas, 0, place
        return canvas, step - self._first.setdefault((seed, canvas), step) + 1, place


@contextmanager
def by_rule(cases: Mapping[int, dict[str, Any]]) -> Iterator[None]:
    """Make random tokens and draws follow the rule, in this process."""
    rule = MixRule(cases)
    with (
        patch.object(noise, "token_ids", rule.token_ids),
        patch.object(Logits, "draw", lambda logits, key: rule.draw(logits, key)),
    ):
        yield


def _mix(canvas: int, step: int, place: int, salt: int) -> int:
    v = (canvas * 1000003 + step * 7919 + place * 104729 + salt) & _LOW
    v = (v * 2654435761) & _LOW
    v ^= v >> 15
    v = (v * 2246822519) & _LOW
    return v ^ (v >> 13)
