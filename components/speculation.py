"""Speculation: several denoising steps in one forward, with the tokens of separate forwards.

A draft is the canvas that some more steps would give if the model's predictions stayed the same.
The next forward runs the real canvas and the drafts, and a draft is right if the step before it
gives exactly the same canvas, as in FreeDave (arXiv 2510.00294).
"""

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import Field

from diffray.components.config import PolicyPart

_GUESS: Final = 0.7  # how likely a draft is to be right before any was checked ...
_WEIGHT: Final = 2.0  # ... which counts as this many checked drafts
_MOST_WEIGHT: Final = 8.0  # of the other requests' results
_ENOUGH: Final = 16.0  # checked drafts from which others can be judged
SUREST: Final = 0.95
_KEPT: Final = 0.5  # of a block's results, for the next block of the request ...
_KEPT_OF_ALL: Final = 0.99  # ... and for all other requests
# What a forward with drafts takes more, in positions: the products of the adapter that drafts.
DRAFTER: Final = 3


class Verify(PolicyPart):
    """Each forward makes drafts of the following canvases, and the next one verifies them."""

    kind: Literal["verify"] = "verify"
    drafts: int = Field(
        4, ge=1, le=16, description="The most drafts of a request that a forward verifies."
    )


@dataclass(slots=True)
class Record:
    """How many drafts were checked and how many of them were right; older ones count less.

    So drafts that did not pay off are tried again eventually.
    """

    right: float = 0.0
    checked: float = 0.0

    def add(self, right: int, checked: int) -> None:
        self.right, self.checked = self.right + right, self.checked + checked

    def fade(self, kept: float) -> None:
        self.right, self.checked = self.right * kept, self.checked * kept

    def over(self, guess: float, weight: float) -> float:
        """Return the share of right drafts, with a guess that counts as `weight` checked ones."""
        return (self.right + guess * weight) / (self.checked + weight)


@dataclass(slots=True)
class DraftAcceptance:
    """How likely a draft is to be accepted and to save a step, if the one before is.

    A request with few results of its own relies on those of others with the same decoder.
    """

    run: int = 0  # drafts in the current forward
    lent: bool = False  # whether there are a copy and masks for a first draft ...
    made: bool = False  # ... and the previous forward made it
    watched: bool = False  # whether the block's first drafts are made even if none are run
    own: Record = field(default_factory=Record)
    others: Record = field(default_factory=Record)  # of all requests with this decoder

    @property
    def rate(self) -> float:
        guess = self.others.over(_GUESS, _WEIGHT)
        weight = min(_WEIGHT + self.others.checked, _MOST_WEIGHT)
        return min(self.own.over(guess, weight), SUREST)

    def begin(self, others: Record) -> None:
        """Start a block; watch all of it if little is known, because its steps differ."""
        self.others, self.watched = others, others.checked < _ENOUGH

    def note(self, right: int, *, foreseen: bool = False, done: bool) -> None:
        """Record how many drafts of a forward were right, or if the first would have been.

        Drafts that are made or run in the forward that ends a block gain no step.
        """
        checked = right + (right < self.run)
        if not self.run:
            right = int(self.made and foreseen and not done)
            checked = int(self.made or (self.lent and done))
        for record, kept in ((self.own, _KEPT), (self.others, _KEPT_OF_ALL)):
            record.add(right, checked)
            if done:
                record.fade(kept)


def strided_drafts(most: int, rate: float, overhead: float) -> int:
    """Return how many drafts a forward of a strided iteration makes: more as long as more pay."""
    paces = [strided_pace(drafts, rate, overhead) for drafts in range(min(most, 1) + 1)]
    while len(paces) <= most and (len(paces) == 2 or paces[-1] > paces[-2]):
        paces.append(strided_pace(len(paces), rate, overhead))
    return paces.index(max(paces))


def strided_pace(drafts: int, rate: float, overhead: float) -> float:
    """Return how many tokens a strided iteration writes in the time of a position.

    A forward makes this many drafts, each of which is right with this chance if those before it
    are. The next one verifies them and makes as many more, which are of use if all were right; else
    one follows that has none to verify. `overhead` is a forward's fixed time.
    """
    if not drafts:
        return 1 / (overhead + 1) if math.isfinite(overhead) else 1.0
    rate = min(rate, SUREST)
    verifying = 1 / (1 - rate**drafts)  # forwards per other one
    tokens = 1 + verifying * (1 + rate * (1 - rate**drafts) / (1 - rate))
    if math.isinf(overhead):
        return tokens / (1 + verifying)
    overhead += DRAFTER
    return tokens / (overhead + drafts + 1 + verifying * (overhead + 2 * drafts + 1))
