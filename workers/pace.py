"""How many steps a round may run before it looks at their results."""

from diffray.components.sequence import Sequence


def steps_ahead(sequence: Sequence) -> int:
    """Return a cautious estimate of the steps that the current block still needs, at least 1.

    Half of what its masks would take at the pace so far, of this block or overall, whichever is
    faster: blocks speed up towards their end. Before a block's first step it is 1.
    """
    policy, pins = sequence.policy, sequence.pins
    if sequence.step == 0 or sequence.measures or (pins is not None and sequence.params.logprobs):
        return 1
    # A step's result is known only after it, or decides the next step's window.
    if policy.speculation is not None or policy.cache.follows_masks:
        return 1
    if policy.iteration.renoises:  # each step has its own temperature
        return 1
    masks = int(sequence.masked.sum())
    here = sequence.stop - max(sequence.start, sequence.prompt_len) - masks
    overall = (len(sequence.final) + here) / (sequence.steps_before + sequence.step)
    return max(int(masks / (2 * max(here / sequence.step, overall, 1.0))), 1)
