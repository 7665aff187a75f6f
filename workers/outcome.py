"""What a round did, copied from the device to the host in one piece.

Letters: B sequences, L positions of the longest block.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from diffray.workers.top_tokens import Ranking


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round did to the block of one sequence, on the host."""

    ids: list[int]
    masked: Tensor
    steps: list[int]  # the step at which each token became final
    logprobs: list[float]
    used: int  # steps until the block was done, or all
    settled: int  # of them and of earlier ones, those after the last mask was gone
    done: bool
    top: list[Ranking]  # the most probable ids at each position, where the request asks


def copy_outcomes(
    lengths: Items[int],
    ids_BL: Tensor,
    masked_BL: Tensor,
    steps_BL: Tensor,
    logprobs_BL: Tensor,
    counts_B3: Tensor,  # used, settled, done
    rankings: dict[int, list[Ranking]],
) -> list[Outcome]:
    """Return the outcome of each sequence; waits for the device, once."""
    bits_BL = logprobs_BL.double().view(torch.long)
    parts = [ids_BL, masked_BL.long(), steps_BL, bits_BL, counts_B3]
    copied = torch.cat(parts, dim=1).cpu().split([part.shape[1] for part in parts], dim=1)
    ids_BL, masked_BL, steps_BL, bits_BL, counts_B3 = copied
    rows = zip(
        lengths,
        ids_BL.tolist(),
        masked_BL.bool(),
        steps_BL.tolist(),
        bits_BL.view(torch.float64).tolist(),
        counts_B3.tolist(),
        strict=True,
    )
    return [
        Outcome(
            ids=ids[:n],
            masked=masked_L[:n],
            steps=steps[:n],
            logprobs=logprobs[:n],
            used=used,
            settled=settled,
            done=bool(done),
            top=rankings.get(b, []),
        )
        for b, (n, ids, masked_L, steps, logprobs, (used, settled, done)) in enumerate(rows)
    ]
