"""From logits to proposals: one token, its confidence and its log-probability per position.

Letters: R rows of the head, Q rows that draw at random, B rows, L positions of a block.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.block import Block, Proposal
from diffray.components.logits import Logits
from diffray.components.mesh import Mesh
from diffray.kernels.acceptance import RATHER_MASKED
from diffray.kernels.confidence import Confidence, Draw


class Draws(NamedTuple):
    """Rows that sample, and the parameters of their distributions."""

    rows_Q: Tensor
    temperature_Q: Tensor
    top_k_Q: Tensor | None  # None if no row asks for it
    top_p_Q: Tensor | None
    min_p_Q: Tensor | None = None

    @property
    def filtered(self) -> bool:
        return any(each is not None for each in (self.top_k_Q, self.top_p_Q, self.min_p_Q))


@dataclass(frozen=True, slots=True)
class Rows:
    """Which positions the head's rows are about, and which of them draw."""

    cells_R: Tensor  # flat index into [B, L]
    draws: Draws | None = None

    def draw(self, block: Block) -> Draw | None:
        """Return how each row draws at this step, or None if no row does."""
        if self.draws is None:
            return None
        row_R = self.cells_R // block.ids_BL.shape[1]
        cold_R = self.draws.temperature_Q.new_zeros(len(row_R))
        return Draw(
            cold_R.index_copy(0, self.draws.rows_Q, self.draws.temperature_Q),
            block.seed_B[row_R],
            block.positions_BL.flatten()[self.cells_R],
            block.draw_step_B[row_R],
        )


@dataclass(slots=True)
class Chosen:
    """The tokens chosen from logits, and what the logits say of them."""

    logits: Logits  # the mask token is forbidden
    rows: Rows
    block: Block
    mask_token_id: int
    mask_logit_R: Tensor
    logsumexp_R: Tensor  # with the mask token
    best_R: Tensor  # the highest logit
    best_ids_R: Tensor
    ids_R: Tensor  # chosen
    tempered: Logits | None = None  # of the rows that draw

    def key(self, rows_Q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the seed, position and step of some rows, on which their noise depends."""
        cells_Q, block = self.rows.cells_R[rows_Q], self.block
        row_Q = cells_Q // block.ids_BL.shape[1]
        return block.seed_B[row_Q], block.positions_BL.flatten()[cells_Q], block.draw_step_B[row_Q]

    def spread(self, values_R: Tensor, elsewhere: float = 0) -> Tensor:
        """Return the rows' values at their positions, [B, L]."""
        onto_BL = values_R.new_full(self.block.ids_BL.shape, elsewhere)
        return spread(values_R, self.rows.cells_R, onto_BL)

    def confidence(self, probability_R: Tensor) -> Tensor:
        """Return these probabilities at their positions, lower where the model prefers the mask."""
        penalty_R = torch.where(self.mask_logit_R > self.best_R, RATHER_MASKED, 0.0)
        return self.spread(probability_R + penalty_R, -torch.inf)

    def proposal(self) -> Proposal:
        chosen_R = self.best_R
        if self.ids_R is not self.best_ids_R:  # others were chosen
            chosen_R = self.logits.gather(self.ids_R.unsqueeze(1)).squeeze(1)
        logprob_R = chosen_R - self.logsumexp_R
        return Proposal(
            spread(self.ids_R, self.rows.cells_R, self.block.ids_BL),
            self.confidence(logprob_R.exp()),
            self.spread(logprob_R),
        )


def choose(logits: Logits, rows: Rows, block: Block, mask_token_id: int) -> Chosen:
    """Choose a token for every head row from its logits, in which the mask is then forbidden."""
    logsumexp_R, mask_logit_R = logits.logsumexp(), logits.column(mask_token_id)
    logits.forbid(mask_token_id)
    best_R, ids_R = logits.best()
    facts = mask_token_id, mask_logit_R, logsumexp_R, best_R, ids_R
    chosen = Chosen(logits, rows, block, *facts, ids_R)
    if rows.draws is not None:
        chosen.tempered = logits.filtered(*rows.draws)
        drawn_Q = chosen.tempered.draw(chosen.key(rows.draws.rows_Q))
        chosen.ids_R = ids_R.index_copy(0, rows.draws.rows_Q, drawn_Q)
    return chosen


def propose_plain(found: Confidence, rows: Rows, block: Block) -> Proposal:
    """Make proposals from the ranks' joined choices, without any other logits than the mask's."""
    logprob_R = found.logits_R - found.logsumexp_R
    penalty_R = torch.where(found.gathered_RK[:, 0] > found.best_R, RATHER_MASKED, 0.0)
    nowhere_BL = logprob_R.new_full(block.ids_BL.shape, -torch.inf)
    return Proposal(
        spread(found.ids_R, rows.cells_R, block.ids_BL),
        spread(logprob_R.exp() + penalty_R, rows.cells_R, nowhere_BL),
        spread(logprob_R, rows.cells_R, torch.zeros_like(nowhere_BL)),
    )


def joined(found: Confidence, mesh: Mesh) -> Confidence:
    """Join the ranks' choices from their slices of the vocabulary."""
    if mesh.size == 1:
        return found
    # One collective for all: each costs more than its bytes. Ids are exact in float32 up to 2**24.
    _, scores_R, logits_R, best_R, logsumexp_R, gathered_RK = found
    ids_R = found.ids_R.to(scores_R.dtype)
    parts_5R = torch.stack([ids_R, scores_R, logits_R, best_R, logsumexp_R])
    packed_WPR = mesh.all_gather(torch.cat([parts_5R, gathered_RK.T]))
    ids_WR, scores_WR, logits_WR, best_WR, logsumexp_WR = packed_WPR[:, :5].unbind(1)
    # Ranks stand in vocabulary order and max takes the first of equals: the lowest id.
    scores_1R, winner_1R = scores_WR.max(0, keepdim=True)
    return Confidence(
        ids_WR.gather(0, winner_1R).squeeze(0).long(),
        scores_1R.squeeze(0),
        logits_WR.gather(0, winner_1R).squeeze(0),
        best_WR.amax(0),
        logsumexp_WR.logsumexp(0),
        packed_WPR[:, 5:].sum(0).T,  # an id's logit is 0 on all ranks but one
    )


def spread(values_R: Tensor, cells_R: Tensor, onto_BL: Tensor) -> Tensor:
    """Return `onto_BL` with the rows' values written at their cells."""
    return onto_BL.flatten().scatter(0, cells_R, values_R).view_as(onto_BL)
