"""The most probable ids at each position of a round's blocks when its token became final.

Only for sequences that request them; the others pay nothing.
Letters: B sequences of the round, G those that request them, L positions, K ids per
position, Q rows.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from diffray.components.block import Proposal
from diffray.components.propose import Chosen
from diffray.components.sequence import Sequence
from diffray.workers.features.feature import Acceptance, Feature
from diffray.workers.outcome import Outcome

if TYPE_CHECKING:
    from diffray.workers.batch_state import BatchState
    from diffray.workers.head_plan import HeadPlan


class Top(NamedTuple):
    """The most probable ids of some positions, best first."""

    cells_Q: Tensor  # flat index into [B, L]
    ids_QK: Tensor
    logprobs_QK: Tensor


class Rankings(Feature):
    """The rankings of requests with `top_logprobs`, across steps."""

    fused = True

    def begin(self, rows: "BatchState") -> None:
        self.sequences = sequences = rows.sequences
        self.asking = [b for b, s in enumerate(sequences) if self.uses(s)]
        length, device = rows.length, rows.device
        most = max(s.params.top_logprobs for s in sequences)
        shape = (len(sequences), length, most)
        self.ids_BLK = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs_BLK = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
        for b in self.asking:
            if (before := sequences[b].block.top) is not None:
                n, k = before[0].shape
                self.ids_BLK[b, :n, :k], self.logprobs_BLK[b, :n, :k] = before

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.params.top_logprobs > 0

    def plan_head(self, head: "HeadPlan") -> None:
        asking = head.blocks_of(self)
        self.spans = tuple(each.span for each in asking)
        self.most = max((each.sequence.params.top_logprobs for each in asking), default=0)

    def needs_logits(self, head: "HeadPlan") -> bool:
        return True

    def inspect(self, chosen: Chosen, proposal: Proposal) -> Proposal:
        """Rank the ids; the mask token is not among them, as it is never proposed."""
        values_QK, ids_QK = chosen.logits.top(self.spans, self.most)
        every_R = chosen.rows.cells_R, chosen.logsumexp_R
        cells_Q, logsumexp_Q = (torch.cat([x[part] for part in self.spans]) for x in every_R)
        self.top = Top(cells_Q, ids_QK, values_QK - logsumexp_Q.unsqueeze(1))
        return proposal

    def written(self, rows: "BatchState", step: Acceptance) -> None:
        """Store the rankings of the accepted positions."""
        top = self.top
        accepted_Q1 = step.accepted_BL.flatten()[top.cells_Q].unsqueeze(1)
        for kept, new_QK in ((self.ids_BLK, top.ids_QK), (self.logprobs_BLK, top.logprobs_QK)):
            flat = kept.view(-1, kept.shape[2])[:, : new_QK.shape[1]]
            flat[top.cells_Q] = torch.where(accepted_Q1, new_QK.to(kept), flat[top.cells_Q])

    def keep(self, rows: "BatchState") -> None:
        """Save the rankings in their sequences, for the next plan."""
        for b in self.asking:
            sequence = self.sequences[b]
            n, k = sequence.block.length, sequence.params.top_logprobs
            parts = self.ids_BLK, self.logprobs_BLK
            sequence.block.top = parts[0][b, :n, :k].clone(), parts[1][b, :n, :k].clone()

    def report(self, outcomes: list[Outcome]) -> None:
        """Copy to the host the ranking at each position, for each sequence that requests it."""
        ids, logprobs = self.ids_BLK.cpu(), self.logprobs_BLK.cpu()
        for b in self.asking:
            k = self.sequences[b].params.top_logprobs
            n = len(outcomes[b].ids)
            pairs = zip(ids[b, :n, :k].tolist(), logprobs[b, :n, :k].tolist(), strict=True)
            # Forbidden ids rank last, with probability 0; they are left out.
            top = [
                [
                    (token, logprob)
                    for token, logprob in zip(*pair, strict=True)
                    if logprob > -math.inf
                ]
                for pair in pairs
            ]
            outcomes[b] = outcomes[b]._replace(top=top)
