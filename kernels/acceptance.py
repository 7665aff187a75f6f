"""Accepts a step's proposals: decides which become final, and updates blocks and canvases.

The rules of the common decoders are numbers of each row, so one call serves rows with different
rules. `components/decoders/` has each rule by itself, and the rules that are not here.

Letters: R rows of the head, B rows of blocks, L positions of the longest block, N positions of all
canvases.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from diffray.kernels.confidence import Confidence
from diffray.kernels.rules import CONFIDENT, SHARE

LONGEST: Final = 64  # positions of a block; comparing all pairs of more does not fit registers
TIE: Final = 1e-5  # positions this close to the row's best are accepted with it, as dInfer does
RATHER_MASKED: Final = -1.0  # added to a confidence where the mask is more probable


class Rules(NamedTuple):
    """The acceptance rule of each row."""

    kind_B: Tensor
    least_B: Tensor  # float64
    steps_B: Tensor


class Progress(NamedTuple):
    """The rows' blocks and their progress; all but the last three fields change in place."""

    ids_BL: Tensor
    masked_BL: Tensor
    steps_BL: Tensor  # the step at which each token became final
    logprobs_BL: Tensor
    steps_B: Tensor  # steps that the block has taken
    done_B: Tensor
    before_B: Tensor  # steps of the generation before the block
    length_B: Tensor
    cells_BL: Tensor  # index into the canvases


class Settling(NamedTuple):
    """The arguments of `settle` after the first."""

    heads_BL: Tensor
    open_BL: Tensor
    rules: Rules
    progress: Progress
    ids_N: Tensor
    masked_N: Tensor

    @staticmethod
    def made_up(rows: int, length: int, device: torch.device | str) -> "Settling":
        """Return rows of every rule, each with a block whose first half is final.

        For checks; the head has a row for each position.
        """
        cells_BL = torch.arange(rows * length, device=device).view(rows, length)
        number_B = torch.arange(rows, device=device)
        masked_BL = (cells_BL % length >= length // 2) & (cells_BL % 3 > 0)
        ones_B = torch.ones_like(number_B)
        rules = Rules(number_B % 3, 0.3 * (number_B % 4).double(), 4 * ones_B)
        progress = Progress(
            cells_BL.clone(),
            masked_BL.clone(),
            torch.zeros_like(cells_BL),
            torch.zeros_like(cells_BL, dtype=torch.float32),
            number_B % 2,
            torch.zeros_like(number_B, dtype=torch.bool),
            8 * ones_B,
            length * ones_B,
            cells_BL,
        )
        canvases = torch.zeros_like(cells_BL).flatten(), masked_BL.flatten().clone()
        return Settling(cells_BL.where(masked_BL, -1), masked_BL, rules, progress, *canvases)


def settle(
    found: Confidence,
    heads_BL: Tensor,
    open_BL: Tensor,
    rules: Rules,
    progress: Progress,
    ids_N: Tensor,
    masked_N: Tensor,
) -> None:
    """Make the accepted tokens final; at least one in each row that has open positions.

    `heads_BL` is each position's row of the head, or -1 if it has none.
    """
    ids_BL, masked_BL, steps_BL, logprobs_BL, steps_B, done_B, before_B, length_B, cells = progress
    none_BL = heads_BL < 0
    logprob_R = found.logits_R - found.logsumexp_R
    rather_R = torch.where(found.gathered_RK[:, 0] > found.best_R, RATHER_MASKED, 0.0)
    confidence_BL = _at(heads_BL, logprob_R.exp() + rather_R, -torch.inf)
    accepted_BL = open_BL & _accepted(confidence_BL, open_BL, rules, steps_B, length_B)
    accepted_BL |= best_where_none(confidence_BL, open_BL, accepted_BL)
    ids_BL.copy_(torch.where(accepted_BL & ~none_BL, _at(heads_BL, found.ids_R, 0), ids_BL))
    logprob_BL = _at(heads_BL, logprob_R.float(), 0.0)
    logprobs_BL.copy_(torch.where(accepted_BL, logprob_BL, logprobs_BL))
    step_B1 = (before_B + steps_B).unsqueeze(1)
    steps_BL.copy_(torch.where(accepted_BL, step_B1, steps_BL))
    masked_BL.logical_and_(~accepted_BL)
    steps_B.add_(~done_B)
    done_B.logical_or_(~masked_BL.any(-1))
    ids_N.index_copy_(0, cells.flatten(), ids_BL.flatten())
    masked_N.index_copy_(0, cells.flatten(), masked_BL.flatten())


def _at(heads_BL: Tensor, values_R: Tensor, other: float) -> Tensor:
    """Return each position's value in the head's rows, or `other` if it has no row."""
    return torch.cat([values_R, values_R.new_full((1,), other)])[heads_BL]  # -1 reads the last


def _accepted(
    confidence_BL: Tensor, open_BL: Tensor, rules: Rules, taken_B: Tensor, length_B: Tensor
) -> Tensor:
    """Return which positions each row's rule accepts; only defined for open positions."""
    kind_B, least_B, steps_B = rules
    scores_BL = confidence_BL.masked_fill(~open_BL, -torch.inf)
    sure_B = torch.minimum(least_B, scores_BL.amax(-1) - TIE)
    share_B = length_B // steps_B + (taken_B < length_B % steps_B)
    left_B = (steps_B - taken_B).clamp(min=1)
    even_B = (open_BL.sum(-1) + left_B - 1) // left_B
    count_B = torch.where(kind_B == SHARE, share_B, even_B)
    high_BL = highest(scores_BL, count_B)
    above_BL = confidence_BL > least_B.unsqueeze(1)
    counted_BL = high_BL | above_BL & (kind_B == SHARE).unsqueeze(1)
    sure_BL = confidence_BL >= sure_B.unsqueeze(1)
    return torch.where((kind_B == CONFIDENT).unsqueeze(1), sure_BL, counted_BL)


def highest(scores_BL: Tensor, count_B: Tensor) -> Tensor:
    """Return which positions hold the highest `count` scores of their row; ties go to the left."""
    order_BL = scores_BL.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores_BL.shape[1], device=scores_BL.device).expand_as(order_BL)
    rank_BL = torch.empty_like(order_BL).scatter_(1, order_BL, places)
    return rank_BL < count_B.unsqueeze(1)


def best_where_none(confidence_BL: Tensor, open_BL: Tensor, accepted_BL: Tensor) -> Tensor:
    """Return a mask of the best open position in each row that has no accepted one."""
    confidence_BL = confidence_BL.nan_to_num(nan=-2.0, neginf=-3.0)
    best_B1 = confidence_BL.masked_fill(~open_BL, -4.0).argmax(-1, keepdim=True)
    is_best_BL = torch.arange(accepted_BL.shape[1], device=best_B1.device) == best_B1
    got_B1 = (accepted_BL & open_BL).any(-1, keepdim=True)
    return is_best_BL & open_BL & ~got_B1
