"""Rows of `renoise`, whose canvases show noise: what they show next, and whether they are done.

Letters: B rows of a round, G of them that are renoised, L positions of the longest block.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.block import Block, Proposal
from diffray.components.iterations import Renoise
from diffray.components.propose import Chosen, spread
from diffray.components.sequence import Sequence
from diffray.kernels import noise
from diffray.workers.features.feature import Acceptance, Feature

if TYPE_CHECKING:
    from diffray.workers.batch_state import BatchState


class Renoising(Feature):
    """The rows' best tokens so far; `BatchState.steps_BL` says when each last changed."""

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.policy.iteration.renoises

    def begin(self, rows: "BatchState") -> None:
        self.slots = slots = rows.slots
        facts, limits = [], []
        for b, s in enumerate(rows.sequences):
            rule = s.policy.iteration
            if isinstance(rule, Renoise):
                assert s.best is not None
                base = s.best.slot * slots.length
                facts.append((b, base, s.block.stop, rule.max_steps, rule.stability))
                limits.append(rule.confidence)
        facts_G5 = send(torch.tensor(facts, dtype=torch.long), slots.device)
        self.rows_G, base_G, stop_G, self.most_G, self.stability_G = facts_G5.unbind(1)
        self.limit_G = send(torch.tensor(limits, dtype=torch.float64), slots.device)
        positions_GL = rows.places.positions_BL[self.rows_G]
        inside_GL = positions_GL < stop_G.unsqueeze(1)
        self.positions_GL = positions_GL.minimum(stop_G.unsqueeze(1) - 1)
        self.cells_GL = (base_G.unsqueeze(1) + positions_GL).where(inside_GL, slots.trash)
        self.best_GL = slots.ids_SN.view(-1)[self.cells_GL]

    waits = uses  # each step has its own temperature

    def inspect(self, chosen: Chosen, proposal: Proposal) -> Proposal:
        """Keep the most probable tokens, whatever is drawn."""
        ids_BL = spread(chosen.best_ids_R, chosen.rows.cells_R, chosen.block.ids_BL)
        self.best = ids_BL, chosen.spread(chosen.best_R - chosen.logsumexp_R)
        return proposal

    def accept(self, rows: "BatchState", step: Acceptance) -> None:
        """Show the next canvas; propose the best tokens, and accept them in rows that end."""
        proposal, block, accepted_BL = step.proposal, step.block, step.accepted_BL
        assert proposal.measures is not None
        rows_G, open_GL = self.rows_G, block.masked_BL[self.rows_G]
        step_G, length_G = block.step_B[rows_G], block.length_B[rows_G]
        best_GL, logprob_GL = (part_BL[rows_G] for part_BL in self.best)
        first_G1 = (block.step_in_block_B[rows_G] == 0).unsqueeze(1)
        changed_GL = first_G1 | (best_GL != self.best_GL)
        since_GL = torch.where(changed_GL, step_G.unsqueeze(1), rows.steps_BL[rows_G])
        stable_G = step_G - since_GL.where(open_GL, 0).amax(1) >= self.stability_G
        entropy_G = proposal.measures.entropy_BL[rows_G].where(open_GL, 0).sum(1) / length_G
        ends_G = (stable_G & (entropy_G < self.limit_G)) | (
            block.step_in_block_B[rows_G] + 1 >= self.most_G
        )
        shown_GL = proposal.ids_BL[rows_G].where(accepted_BL[rows_G], self._noise(block))
        self.best_GL = best_GL.where(open_GL, self.best_GL)
        for kept_BL, new_GL in ((rows.ids_BL, shown_GL), (rows.steps_BL, since_GL)):
            kept_BL[rows_G] = new_GL.where(open_GL, kept_BL[rows_G])
        step.proposal = replace(
            proposal,
            ids_BL=proposal.ids_BL.index_copy(0, rows_G, best_GL),
            logprob_BL=proposal.logprob_BL.index_copy(0, rows_G, logprob_GL),
        )
        step.accepted_BL = accepted_BL.index_copy(0, rows_G, open_GL & ends_G.unsqueeze(1))

    def keep(self, rows: "BatchState") -> None:
        """Save the best tokens for the next plan."""
        self.slots.ids_SN.view(-1)[self.cells_GL] = self.best_GL

    def _noise(self, block: Block) -> Tensor:
        shape = self.positions_GL.shape
        seed_R, step_R = (
            part_B[self.rows_G].unsqueeze(1).expand(shape).flatten()
            for part_B in (block.seed_B, block.step_B)
        )
        key = seed_R, self.positions_GL.flatten(), step_R
        return noise.token_ids(*key, self.slots.vocab_size).view(shape)
