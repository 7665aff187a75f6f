"""How many steps a round may run before it looks at their results."""

from diffray.components.sequence import Sequence


def steps_ahead(sequence: Sequence) -> int:
    """Return a cautious estimate of the steps that the current block still needs, at least 1.

    Half of what its masks would take at the pace so far, of this block or overall, whichever is
    faster: blocks speed up towards their end. Before a block's first step it is 1.
    """
    policy = sequence.policy
    weighs = sequence.canvas.shrinks and sequence.params.logprobs
    if sequence.block.step == 0 or sequence.may_shrink or weighs:
        return 1
    # A step's result is known only after it, or decides the next step's window.
    if policy.speculation is not None or policy.cache.follows_masks:
        return 1
    if policy.iteration.renoises:  # each step has its own temperature
        return 1
    masks = int(sequence.block.masked.sum())
    here = sequence.block.stop - max(sequence.block.start, sequence.canvas.prompt_len) - masks
    overall = (len(sequence.canvas.final) + here) / (sequence.steps_before + sequence.block.step)
    return max(int(masks / (2 * max(here / sequence.block.step, overall, 1.0))), 1)
