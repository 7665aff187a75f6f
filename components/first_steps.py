"""First steps that requests share under bidirectional attention, exactly or as an approximation.

K/V then depend on the whole canvas. A request's first step runs all of it: the prompt, masks, and
a suffix. Another request with the same canvas has the same K/V and hidden states at that step,
whatever its seed, temperature or decoder, so it can reuse both. Later steps overwrite a sequence's
K/V, so a copy is kept, on pages that are evicted when others need them.

Letters: N positions that the first block's logits come from, H hidden size.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from diffray.components.lora import LoRA

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


class FirstStepKey(NamedTuple):
    """What two requests must have in common to share their first step."""

    owner: tuple[str, LoRA | None]  # the salt and the adapter
    prompt: tuple[int, ...]
    length: int
    suffix: tuple[int, ...]
    read: tuple[int, int, bool]  # the positions whose hidden states the step reads

    @staticmethod
    def of(sequence: "Sequence") -> "FirstStepKey | None":
        """Return the key of a sequence's first step, or None if that is not shared."""
        iteration = sequence.policy.iteration
        more = sequence.guided, sequence.images.seen, iteration.soft
        if sequence.policy.causal_length or sequence.block.index or any(more):
            return None
        canvas, block = sequence.canvas, sequence.block
        if not canvas.starts_masked:
            return None
        assert sequence.policy.cache.window(sequence, 0) == (0, canvas.length)
        first = max(block.start - sequence.spec.logit_shift, 0)  # the same if it is decided alone
        return FirstStepKey(
            (sequence.cache_salt, sequence.lora),
            canvas.prompt,
            canvas.length,
            canvas.suffix,
            (first, block.stop, block.first_alone),
        )


@dataclass(frozen=True, slots=True, eq=False)
class FirstStep:
    """What a first step stored and computed."""

    pages: list[int]
    start: int  # the first position of `hidden_NH`
    hidden_NH: Tensor


class FirstSteps:
    """The kept first steps, least recently used first.

    With `approximates`, a prompt may also take the K/V of a prefix from another canvas.
    """

    def __init__(self, page_size: int, *, enabled: bool, approximates: bool) -> None:
        self.page_size, self.enabled, self.approximates = page_size, enabled, approximates
        self.kept: dict[FirstStepKey, FirstStep] = {}
        self.num_pages = 0

    def find(self, key: FirstStepKey) -> FirstStep | None:
        """Return the first step of the same canvas."""
        found = self.kept.pop(key, None)
        if found is not None:
            self.kept[key] = found
        return found

    def alike(self, key: FirstStepKey) -> list[int]:
        """Return the pages of the longest prefix that the prompt shares with another.

        Their K/V are an approximation: they were computed on another canvas.
        """
        best: list[int] = []
        if not self.approximates:
            return best
        for other, kept in self.kept.items():
            if other.owner == key.owner:
                equal = _equal_positions(other.prompt, key.prompt)
                pages = min(equal, key.read[0]) // self.page_size
                if pages > len(best):
                    best = kept.pages[:pages]
        return best

    def keep(self, key: FirstStepKey, step: FirstStep) -> None:
        assert key not in self.kept
        self.kept[key] = step
        self.num_pages += len(step.pages)

    def give_up(self) -> list[int]:
        """Evict the least recently used first step; return its pages."""
        pages = self.kept.pop(next(iter(self.kept))).pages
        self.num_pages -= len(pages)
        return pages

    def forget(self) -> list[int]:
        """Evict all first steps; return their pages."""
        pages: list[int] = []
        while self.kept:
            pages += self.give_up()
        return pages


def _equal_positions(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)
