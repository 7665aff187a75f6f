"""Speculation: several denoising steps in one forward, with the tokens of as many forwards.

A draft is the canvas that some more steps would give if the model's predictions stayed as they are.
The next forward runs the real canvas and the drafts, and a draft is right if the step before it
gives the very same canvas: so FreeDave does (arXiv 2510.00294).
"""

from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field

from diffray.components.config import PolicyPart

_GUESS: Final = 0.7  # how likely a draft is to be right before any was checked ...
_WEIGHT: Final = 2.0  # ... which counts as much as so many checked ones
_SUREST: Final = 0.95


class Verify(PolicyPart):
    """Each forward makes drafts of the following canvases, and the next one verifies them."""

    kind: Literal["verify"] = "verify"
    drafts: int = Field(
        4, ge=1, le=16, description="The most drafts of a request that a forward verifies."
    )


@dataclass(slots=True)
class Chance:
    """How likely a draft of a request is to be right if the one before is."""

    run: int = 0  # drafts in the current forward
    right: float = 0.0
    checked: float = 0.0

    @property
    def value(self) -> float:
        found = (self.right + _GUESS * _WEIGHT) / (self.checked + _WEIGHT)
        return min(found, _SUREST)

    def note(self, right: int, *, done: bool) -> None:
        """Take in how many drafts of a forward were right, and whether they ended the block."""
        if self.run:
            self.right += right
            self.checked += right + (right < self.run and not done)
        if done:  # what is long ago counts less, so what did not pay is tried again some day
            self.right, self.checked = self.right / 2, self.checked / 2
