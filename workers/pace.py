"""How many steps a round may run before it looks at their results."""

from diffray.components.sequence import Sequence
from diffray.workers.features.order import FEATURES


def steps_ahead(sequence: Sequence) -> int:
    """Return a cautious estimate of the steps that the current block still needs, at least 1.

    Half of what its masks would take at the pace so far, of this block or overall, whichever is
    faster: blocks speed up towards their end. Before a block's first step it is 1.
    """
    # Such a cache places a step's window by the result of the step before.
    waits = sequence.policy.cache.follows_masks or any(each.waits(sequence) for each in FEATURES)
    if sequence.block.step == 0 or waits:
        return 1
    masks = int(sequence.block.masked.sum())
    here = sequence.block.stop - max(sequence.block.start, sequence.canvas.prompt_len) - masks
    overall = (len(sequence.canvas.final) + here) / (sequence.steps_before + sequence.block.step)
    return max(int(masks / (2 * max(here / sequence.block.step, overall, 1.0))), 1)
