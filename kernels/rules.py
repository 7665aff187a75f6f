"""Decoding rules as numbers, which decoders give and kernels read; without torch.

`acceptance.py` carries out the kinds of `Rule`, `credit.py` what `Gain` describes.
"""

from typing import Final, NamedTuple

CONFIDENT: Final = 0  # confidences of at least `least`, or close to the row's best
SHARE: Final = 1  # confidences above `least`, or an equal share of the block in each of `steps`
EVEN: Final = 2  # an equal share of the masks in each of the remaining `steps`


class Rule(NamedTuple):
    """The acceptance rule of one row."""

    kind: int
    least: float = 0.0
    steps: int = 1


class Gain(NamedTuple):
    """How a row gives credit: it adds alpha * ln(1 + credit) to logits."""

    alpha: float
    gamma: float  # the top id gains its probability to this power
    decay: float  # each step multiplies credit by this
