"""Measures of the distributions that tokens are drawn from, for decoders that ask for them.

Letters: B rows, L positions of the longest block, Q rows of the head that are measured.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from diffray.components.block import Measures, Proposal
from diffray.components.logits import Logits
from diffray.components.propose import Chosen, spread
from diffray.components.sequence import Sequence
from diffray.workers.draws import join_draws
from diffray.workers.features.feature import Feature, StoredLogits

if TYPE_CHECKING:
    from diffray.workers.batch_plan import BatchPlan
    from diffray.workers.head_plan import HeadPlan


class Distributions(Feature):
    """Rows whose decoders see measures."""

    fused = True
    logits: Logits | None = None  # from `read` to `inspect`: they are large

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.policy.decoder.measures

    def plan_head(self, head: "HeadPlan") -> None:
        ours = [each.distribution for each in head.blocks_of(self)]
        self.draws = join_draws(ours, head.device)

    def needs_logits(self, head: "HeadPlan") -> bool:
        return self.draws is not None

    def read(self, plan: "BatchPlan", head: StoredLogits) -> None:
        """Keep the distributions with the mask token, unlike those of a draw."""
        if self.draws is not None:
            self.logits = head.logits.filtered(*self.draws)

    def inspect(self, chosen: Chosen, proposal: Proposal) -> Proposal:
        logits, self.logits = self.logits, None
        if self.draws is None or logits is None:
            return proposal
        return replace(proposal, measures=measures_of(chosen, logits, self.draws.rows_Q))


def measures_of(chosen: Chosen, logits: Logits, rows_Q: Tensor) -> Measures:
    """Measure the distributions of some rows, given as logits."""
    logsumexp_Q = logits.logsumexp()
    own_Q = logits.gather(chosen.ids_R[rows_Q].unsqueeze(1)).squeeze(1)
    best_Q2 = (logits.top((slice(None),), 2)[0] - logsumexp_Q.unsqueeze(1)).exp()
    found = (own_Q - logsumexp_Q).exp(), best_Q2[:, 0] - best_Q2[:, 1], logits.entropy()
    cells_Q = chosen.rows.cells_R[rows_Q]
    zero_BL = logsumexp_Q.new_zeros(chosen.block.ids_BL.shape)
    return Measures(*(spread(values_Q, cells_Q, zero_BL) for values_Q in found))
