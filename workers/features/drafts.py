"""Drafts on the device: which of them were right, and the next ones.

Letters: B rows of sequences and drafts, L positions of the longest block, G sequences with a draft
that is this many steps ahead, R rows of the head, Q those that draw, K tokens of each.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.block import Block, Proposal
from diffray.components.propose import Chosen
from diffray.components.sequence import Sequence
from diffray.kernels import noise
from diffray.workers.features.feature import Acceptance, Feature

if TYPE_CHECKING:
    from diffray.workers.batch_state import BatchState
    from diffray.workers.head_plan import HeadPlan

_LIKELY = 16  # tokens that drafts are drawn from


class Link(NamedTuple):
    """The rows of the drafts that are a given number of steps ahead, and of their sequences."""

    rows_G: Tensor
    drafts_G: Tensor


class Likely(NamedTuple):
    """The most probable tokens of sampled positions, best first; drafts are drawn from them."""

    ids_BLK: Tensor
    scores_BLK: Tensor  # logits over the temperature; -inf where filters leave a token out
    logprobs_BLK: Tensor  # without temperature

    def drawn_at(self, proposal: Proposal, block: Block) -> Proposal:
        """Return the proposal of another step if the model's predictions stayed the same."""
        key = block.seed_B.unsqueeze(1), block.positions_BL, block.step_B.unsqueeze(1)
        shape = self.ids_BLK.shape
        seed_R, position_R, step_R = (part.expand(shape[:2]).flatten() for part in key)
        noise_RK = noise.gumbel(seed_R, position_R, step_R, self.ids_BLK.flatten(0, 1))
        scores_BLK = self.scores_BLK
        best_BL1 = (scores_BLK + noise_RK.view(shape).to(scores_BLK)).argmax(-1, keepdim=True)
        drawn_BL = scores_BLK[..., 0] > -torch.inf
        found_BL = self.logprobs_BLK.gather(-1, best_BL1).squeeze(-1)
        logprob_BL = found_BL.where(drawn_BL, proposal.logprob_BL)
        prefers_mask_BL = proposal.confidence_BL < 0
        confidence_BL = (logprob_BL.exp() - prefers_mask_BL.long()).where(
            drawn_BL, proposal.confidence_BL
        )
        ids_BL = self.ids_BLK.gather(-1, best_BL1).squeeze(-1).where(drawn_BL, proposal.ids_BL)
        return replace(proposal, ids_BL=ids_BL, confidence_BL=confidence_BL, logprob_BL=logprob_BL)


class Drafts(Feature):
    """The links of all rows, nearest first."""

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return sequence.policy.speculation is not None and bool(sequence.copies)

    def begin(self, rows: "BatchState") -> None:
        number = {row.sequence: at for at, row in enumerate(rows.rows) if row.copy is None}
        self.links: list[Link] = []
        for ahead in range(1, max(row.ahead for row in rows.rows) + 1):
            pairs = [(number[r.sequence], at) for at, r in enumerate(rows.rows) if r.ahead == ahead]
            self.links.append(Link(*send(torch.tensor(pairs), rows.device).unbind(1)))

    @staticmethod
    def waits(sequence: Sequence) -> bool:
        return sequence.policy.speculation is not None

    def plan_head(self, head: "HeadPlan") -> None:
        self.likely: Likely | None = None
        self.redraws = any(each.sequence.params.draws for each in head.blocks_of(self))

    def needs_logits(self, head: "HeadPlan") -> bool:
        """Drafts of rows that sample are drawn from their most probable tokens."""
        return self.redraws

    def inspect(self, chosen: Chosen, proposal: Proposal) -> Proposal:
        draws, tempered = chosen.rows.draws, chosen.tempered
        if not self.redraws or draws is None or tempered is None:
            return proposal
        rows_Q, logsumexp_R = draws.rows_Q, chosen.logsumexp_R
        scores_QK, ids_QK = tempered.top((slice(None),), _LIKELY)
        ids_RK = ids_QK.new_zeros(len(logsumexp_R), ids_QK.shape[1]).index_copy(0, rows_Q, ids_QK)
        logprobs_QK = (chosen.logits.gather(ids_RK) - logsumexp_R.unsqueeze(1))[rows_Q]
        cells_Q = chosen.rows.cells_R[rows_Q]
        shape = *chosen.block.ids_BL.shape, ids_QK.shape[1]

        def spread(values_QK: Tensor, elsewhere: float) -> Tensor:
            all_BLK = values_QK.new_full(shape, elsewhere)
            all_BLK.view(-1, shape[-1])[cells_Q] = values_QK
            return all_BLK

        found = spread(ids_QK, 0), spread(scores_QK, -torch.inf), spread(logprobs_QK, 0.0)
        self.likely = Likely(*found)
        return proposal

    def after(self, rows: "BatchState", step: Acceptance) -> None:
        last_B = self._take_over(rows, step)
        self._make(rows, step, last_B)

    def _take_over(self, rows: "BatchState", step: Acceptance) -> Tensor:
        """Let sequences take over the results of their drafts that were right.

        Returns for each row the number of the row with its latest canvas that the model has seen.
        """
        accepted_BL, masked_BL = step.accepted_BL, step.masked_BL
        last_B = torch.arange(len(accepted_BL), device=rows.device)
        going_B = torch.ones_like(last_B, dtype=torch.bool)
        known_B = masked_BL.any(-1) & ~_guessed(accepted_BL, step.proposal)
        for ahead, (rows_G, drafts_G) in enumerate(self.links):
            same_GL = step.block.ids_BL[drafts_G] == rows.ids_BL[rows_G]
            same_GL &= masked_BL[drafts_G] == rows.masked_BL[rows_G]
            same_G = same_GL.all(-1)
            if not ahead:
                rows.foreseen_B = torch.zeros_like(rows.done_B).index_copy(0, rows_G, same_G)
            right_G = going_B[rows_G] & known_B[drafts_G] & same_G
            going_B = going_B.index_copy(0, rows_G, right_G)
            last_B = last_B.index_copy(0, rows_G, torch.where(right_G, drafts_G, last_B[rows_G]))
            written_GL = accepted_BL[drafts_G] & right_G.unsqueeze(1)
            rows.ids_BL = _taken(rows.ids_BL, rows_G, drafts_G, written_GL)
            rows.steps_BL = _taken(rows.steps_BL, rows_G, drafts_G, written_GL)
            rows.logprobs_BL = _taken(rows.logprobs_BL, rows_G, drafts_G, written_GL)
            left_GL = rows.masked_BL[rows_G] & ~written_GL
            rows.masked_BL = rows.masked_BL.index_copy(0, rows_G, left_GL)
            rows.steps_B = rows.steps_B.index_add(0, rows_G, right_G.long())
        return last_B

    def _make(self, rows: "BatchState", step: Acceptance, last_B: Tensor) -> None:
        """Write the next drafts: what decoders would accept of the last proposals, by step."""
        proposal, block = step.proposal.rows(last_B), step.block
        likely = self.likely and Likely(*(part[last_B] for part in self.likely))
        ids_BL, masked_BL = rows.ids_BL, rows.masked_BL
        known_B = torch.ones_like(last_B, dtype=torch.bool)
        for ahead, (rows_G, drafts_G) in enumerate(self.links):
            steps_B = rows.steps_B + ahead
            block = rows.shown(
                replace(
                    block,
                    ids_BL=ids_BL,
                    masked_BL=masked_BL,
                    step_B=rows.places.before_B + steps_B,
                    step_in_block_B=steps_B,
                )
            )
            drawn = likely.drawn_at(proposal, block) if likely else proposal
            accepted_BL = rows.choose(drawn, block) & masked_BL
            known_B = known_B & ~_guessed(accepted_BL, drawn)
            ids_BL = torch.where(accepted_BL, drawn.ids_BL, ids_BL)
            masked_BL = masked_BL & ~accepted_BL
            rows.ids_BL = rows.ids_BL.index_copy(0, drafts_G, ids_BL[rows_G])
            left_GL = masked_BL[rows_G] & known_B[rows_G].unsqueeze(1)
            rows.masked_BL = rows.masked_BL.index_copy(0, drafts_G, left_GL)
            rows.steps_B = rows.steps_B.index_copy(0, drafts_G, rows.steps_B[rows_G] + ahead + 1)


def _taken(kept_BL: Tensor, rows_G: Tensor, drafts_G: Tensor, written_GL: Tensor) -> Tensor:
    taken_GL = torch.where(written_GL, kept_BL[drafts_G], kept_BL[rows_G])
    return kept_BL.index_copy(0, rows_G, taken_GL)


def _guessed(accepted_BL: Tensor, proposal: Proposal) -> Tensor:
    """Return the rows that accepted a position for which the model has proposed nothing."""
    return (accepted_BL & (proposal.confidence_BL == -torch.inf)).any(-1)
