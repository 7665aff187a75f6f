"""A round's outcome, copied from the device to the host in one transfer.

Letters: B sequences, L positions of the longest block.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.sequence import Sequence

Ranking = list[tuple[int, float]]  # ids and log-probabilities, best first


class Outcome(NamedTuple):
    """The state of one sequence's block after a round, on the host."""

    ids: list[int]
    masked: Tensor
    decided: int  # positions before the first mask
    steps: list[int]  # the step at which each token became final
    logprobs: list[float]
    step: int  # steps of the block so far, up to its end
    post_steps: int  # those of them after the last mask
    done: bool
    foreseen: bool  # whether the last step's canvas is that of the first draft
    top: list[Ranking]  # the most probable ids at each position, if requested
    drafts: tuple[int, ...] = ()  # of the next block

    def verified(self, sequence: Sequence) -> "Outcome":
        """Return what is final of a block of drafts: nothing, or what ends before the first mask.

        The block ends there too.
        """
        if not sequence.block.verifies:
            return self._replace(decided=0)
        size = self.decided
        sequence.cut(size)
        return self._replace(
            drafts=tuple(self.ids[size : size + sequence.canvas.num_drafts]),
            ids=self.ids[:size],
            masked=self.masked[:size],
            steps=self.steps[:size],
            logprobs=self.logprobs[:size],
            top=self.top[:size],
        )

    @staticmethod
    def before_steps(sequence: Sequence, mask_token_id: int) -> "Outcome":
        """Return the outcome of a block in which nothing has been decided yet."""
        block = sequence.block
        given = sequence.canvas.given(block.start, block.stop)
        return Outcome(
            ids=[mask_token_id if token is None else token for token in given],
            masked=block.masked,
            decided=0,
            steps=[0] * len(given),
            logprobs=[0.0] * len(given),
            step=block.step,
            post_steps=0,
            done=not bool(block.masked.any()),
            foreseen=False,
            top=[],
        )


def copy_outcomes(
    lengths: Items[int],
    ids_BL: Tensor,
    masked_BL: Tensor,
    steps_BL: Tensor,
    logprobs_BL: Tensor,
    counts_B4: Tensor,  # step, post_steps, done, foreseen
) -> list[Outcome]:
    """Return the outcome of each sequence; waits for the device, once."""
    bits_BL = logprobs_BL.double().view(torch.long)
    parts = [ids_BL, masked_BL.long(), steps_BL, bits_BL, counts_B4]
    copied = torch.cat(parts, dim=1).cpu().split([part.shape[1] for part in parts], dim=1)
    ids_BL, masked_BL, steps_BL, bits_BL, counts_B4 = copied
    decided_B = masked_BL.argmax(1).where(masked_BL.any(1), masked_BL.shape[1])
    rows = zip(
        lengths,
        ids_BL.tolist(),
        masked_BL.bool().unbind(),
        decided_B.tolist(),
        steps_BL.tolist(),
        bits_BL.view(torch.float64).tolist(),
        counts_B4.tolist(),
        strict=True,
    )
    return [
        Outcome(
            ids[:n],
            masked_L[:n],
            min(decided, n),
            steps[:n],
            logprobs[:n],
            step,
            post_steps,
            bool(done),
            bool(foreseen),
            [],
        )
        for n, ids, masked_L, decided, steps, logprobs, counts in rows
        for step, post_steps, done, foreseen in (counts,)
    ]
