"""From logits to proposals: one token, its confidence and its log-probability per position.

Letters: R rows of the head, Q rows that draw at random, E single logits to edit, B rows, L
positions of a block, K remembered or ranked ids.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.block import Block, Proposal, Top
from diffray.components.decoder import Decoder, Memory
from diffray.components.logits import Logits
from diffray.components.mesh import Mesh
from diffray.kernels.confidence import Confidence, Draw

_RATHER_MASKED = -1.0


class Draws(NamedTuple):
    """Rows with a temperature, and how they draw."""

    rows_Q: Tensor
    temperature_Q: Tensor
    top_k_Q: Tensor | None  # None where no row asks for it
    top_p_Q: Tensor | None


class Edits(NamedTuple):
    """What is added to single logits: biases, and -inf for forbidden tokens."""

    rows_E: Tensor
    ids_E: Tensor
    values_E: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Which positions the head's rows are about, and how their tokens are chosen."""

    cells_R: Tensor  # flat index into [B, L]
    draws: Draws | None
    edits: Edits | None
    only: tuple[tuple[slice, Tensor], ...]  # rows that may take these ids and no others
    ranked: tuple[slice, ...]  # rows that ask for the most probable ids ...
    num_ranked: int  # ... and how many of them

    @property
    def plain(self) -> bool:
        """Whether nothing is asked for that needs the logits themselves."""
        filtered = (
            self.draws is not None and (self.draws.top_k_Q, self.draws.top_p_Q) != (None,) * 2
        )
        return not (filtered or self.edits or self.only or self.ranked)

    def draw(self, block: Block) -> Draw | None:
        """Return how each row draws at this step; None where none does."""
        if self.draws is None:
            return None
        row_R = self.cells_R // block.ids_BL.shape[1]
        cold_R = self.draws.temperature_Q.new_zeros(len(row_R))
        return Draw(
            cold_R.index_copy(0, self.draws.rows_Q, self.draws.temperature_Q),
            block.seed_B[row_R],
            block.positions_BL.flatten()[self.cells_R],
            block.step_B[row_R],
        )


@dataclass(frozen=True, slots=True)
class Team:
    """The rows of a round that share a decoder."""

    decoder: Decoder
    rows_G: Tensor
    memory: Memory | None


def propose(
    logits: Logits, rows: Rows, block: Block, teams: Items[Team], mask_token_id: int
) -> Proposal:
    """Choose a token for every head row from its logits, which are changed in place."""
    for team in teams:
        if team.memory is not None:
            _remember(logits, rows, block, team, team.memory)
    lse_R = logits.logsumexp()
    mask_logit_R = logits.column(mask_token_id)
    logits.forbid(mask_token_id)
    best_R, ids_R = logits.best()
    top = _rank(logits, rows, lse_R) if rows.ranked else None
    chosen_R = best_R
    if rows.draws is not None:
        cells_Q = rows.cells_R[rows.draws.rows_Q]
        row_Q = cells_Q // block.ids_BL.shape[1]
        key = block.seed_B[row_Q], block.positions_BL.flatten()[cells_Q], block.step_B[row_Q]
        ids_R = ids_R.index_copy(0, rows.draws.rows_Q, logits.sample(*rows.draws, key))
        chosen_R = logits.gather(ids_R.unsqueeze(1)).squeeze(1)
    rather_masked_R = mask_logit_R > best_R
    return _proposal(ids_R, chosen_R - lse_R, rather_masked_R, rows.cells_R, block, top)


def propose_plain(found: Confidence, rows: Rows, block: Block, mesh: Mesh) -> Proposal:
    """Join what the ranks found in their parts of the vocabulary; no logits are left to look at."""
    best_R, lse_R = found.best_R, found.logsumexp_R
    ids_R, chosen_R = found.ids_R, found.logits_R
    if mesh.size > 1:
        # Ranks stand in vocabulary order and max takes the first of equals: the lowest id.
        winner_1R = mesh.all_gather(found.scores_R).max(0, keepdim=True).indices
        ids_R, chosen_R = (
            mesh.all_gather(part).gather(0, winner_1R).squeeze(0) for part in (ids_R, chosen_R)
        )
        best_R = mesh.all_gather(best_R).amax(0)
        lse_R = mesh.all_gather(lse_R).logsumexp(0)
    rather_masked_R = mesh.all_reduce(found.gathered_RK).squeeze(1) > best_R
    return _proposal(ids_R, chosen_R - lse_R, rather_masked_R, rows.cells_R, block, None)


def _proposal(
    ids_R: Tensor,
    logprob_R: Tensor,
    rather_masked_R: Tensor,
    cells_R: Tensor,
    block: Block,
    top: Top | None,
) -> Proposal:
    confidence_R = logprob_R.exp() + torch.where(rather_masked_R, _RATHER_MASKED, 0.0)
    return Proposal(
        _spread(ids_R, cells_R, block.ids_BL),
        _spread(confidence_R, cells_R, logprob_R.new_full(block.ids_BL.shape, -torch.inf)),
        _spread(logprob_R, cells_R, logprob_R.new_zeros(block.ids_BL.shape)),
        top,
    )


def _rank(logits: Logits, rows: Rows, lse_R: Tensor) -> Top:
    """Return the most probable ids of the rows that ask, from the logits that proposals are from.

    The mask token is not among them, as it is never proposed.
    """
    values_QK, ids_QK = logits.top(rows.ranked, rows.num_ranked)
    cells_Q, lse_Q = (torch.cat([x[part] for part in rows.ranked]) for x in (rows.cells_R, lse_R))
    return Top(cells_Q, ids_QK, values_QK - lse_Q.unsqueeze(1))


def _remember(logits: Logits, rows: Rows, block: Block, team: Team, memory: Memory) -> None:
    """Tell a team's decoder what is on top, and add the bonus it answers with to the logits."""
    top_R, ids_R = logits.best()
    prob_R = (top_R - logits.logsumexp()).exp()
    ids_BL = _spread(ids_R, rows.cells_R, block.ids_BL)
    prob_BL = _spread(prob_R, rows.cells_R, prob_R.new_zeros(block.ids_BL.shape))
    bonus = team.decoder.remember(
        memory, block.rows(team.rows_G), ids_BL[team.rows_G], prob_BL[team.rows_G]
    )
    place_B = torch.full_like(block.seed_B, -1)
    place_B[team.rows_G] = torch.arange(len(team.rows_G), device=place_B.device)
    width = block.ids_BL.shape[1]
    place_R = place_B[rows.cells_R // width]
    at_R = place_R.clamp(min=0) * width + rows.cells_R % width
    ids_RK = bonus.ids_BLK.flatten(0, 1)[at_R]
    values_RK = bonus.values_BLK.flatten(0, 1)[at_R]
    ours_RK = (place_R >= 0).unsqueeze(1) & (ids_RK >= 0)
    row_RK = torch.arange(len(at_R), device=at_R.device).unsqueeze(1).expand_as(ids_RK)
    nothing = torch.zeros_like(values_RK)
    logits.add(row_RK, ids_RK.clamp(min=0), torch.where(ours_RK, values_RK, nothing))


def _spread(values_R: Tensor, cells_R: Tensor, onto_BL: Tensor) -> Tensor:
    """Return `onto_BL` with the rows' values written at their cells."""
    return onto_BL.flatten().scatter(0, cells_R, values_R).view_as(onto_BL)
