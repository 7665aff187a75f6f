"""Chooses each row's token from hidden states or logits, and returns what a decoder needs.

Letters: R rows of the head, H hidden size, V this rank's vocabulary, K gathered ids, Q rows that
draw at random.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.kernels import noise
from diffray.kernels.linear import linear


class Draw(NamedTuple):
    """How rows draw at random."""

    temperature_R: Tensor  # a row with 0 takes its best id; otherwise at least 1e-5
    seed_R: Tensor
    position_R: Tensor
    step_R: Tensor


class Confidence(NamedTuple):
    """What a decoder needs of each row; values are float32, or float64 if the logits are."""

    ids_R: Tensor  # the chosen id; ties go to the lowest
    scores_R: Tensor  # what decided: the id's logit, with temperature and noise if the row draws
    logits_R: Tensor
    best_R: Tensor  # the largest logit of all ids that may be chosen
    logsumexp_R: Tensor  # over all ids of this rank, including the forbidden one
    gathered_RK: Tensor  # the logits of the requested ids; 0 for ids of other ranks


class Extremes(NamedTuple):
    """What is known of each row's logits."""

    logsumexp_R: Tensor  # over all of them
    best_R: Tensor  # the largest but for the forbidden one ...
    index_R: Tensor  # ... and its column, the lowest of equal ones


def extremes(logits_RV: Tensor, forbidden: int | None) -> Extremes:
    """Find the extremes of each row; `forbidden` is a column."""
    lse_R = logits_RV.logsumexp(1)
    if forbidden is None:
        return Extremes(lse_R, *logits_RV.max(dim=1))
    kept_R = logits_RV[:, forbidden].clone()
    logits_RV[:, forbidden] = -torch.inf
    best_R, index_R = logits_RV.max(dim=1)
    logits_RV[:, forbidden] = kept_R
    return Extremes(lse_R, best_R, index_R)


def confidence(
    hidden_RH: Tensor,
    head_VH: Tensor,
    start: int,
    forbidden: int,
    gather_RK: Tensor,
    draw: Draw | None,
    find: Callable[[Tensor, int | None], Extremes] = extremes,
) -> Confidence:
    """Return each row's choice among the ids [start, start + V); the forbidden id is never chosen.

    Logits are rounded to the dtype of the head, as if they had been stored.
    """
    logits_RV = linear(hidden_RH, head_VH)
    return confidence_of_logits(logits_RV, start, forbidden, gather_RK, draw, find)


def confidence_of_logits(
    logits_RV: Tensor,
    start: int,
    forbidden: int,
    gather_RK: Tensor,
    draw: Draw | None,
    find: Callable[[Tensor, int | None], Extremes] = extremes,
) -> Confidence:
    """Return the same as `confidence` from stored logits, which are not modified."""
    if logits_RV.dtype != torch.float64:
        logits_RV = logits_RV.float()
    size = logits_RV.shape[1]
    column_RK = gather_RK - start
    here_RK = (column_RK >= 0) & (column_RK < size)
    gathered_RK = logits_RV.gather(1, column_RK.clamp(0, size - 1)).masked_fill(~here_RK, 0.0)
    column = forbidden - start if 0 <= forbidden - start < size else None
    lse_R, best_R, index_R = find(logits_RV, column)
    if draw is None:
        return Confidence(index_R + start, best_R, best_R, best_R, lse_R, gathered_RK)
    # Noise for a whole vocabulary is expensive, so only rows that draw get any.
    rows_Q = draw.temperature_R.nonzero().squeeze(1)
    key_Q = draw.seed_R[rows_Q], draw.position_R[rows_Q], draw.step_R[rows_Q]
    ids_V = torch.arange(start, start + size, device=logits_RV.device)
    tempered_QV = logits_RV[rows_Q] / draw.temperature_R[rows_Q].unsqueeze(1)
    if column is not None:
        tempered_QV[:, column] = -torch.inf
    noise_QV = noise.gumbel(*key_Q, ids_V.unsqueeze(0)).to(tempered_QV)
    score_Q, drawn_Q = (tempered_QV + noise_QV).max(dim=1)
    scores_R = best_R.to(score_Q).index_copy(0, rows_Q, score_Q)
    index_R = index_R.index_copy(0, rows_Q, drawn_Q)
    logits_R = logits_RV.gather(1, index_R.unsqueeze(1)).squeeze(1)
    return Confidence(index_R + start, scores_R, logits_R, best_R, lse_R, gathered_RK)
