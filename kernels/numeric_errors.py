"""How far a program's outputs are from those of the reference.

An error is a difference as a share of the number itself or, if that is larger, of the root mean
square of its row. So one wrong number counts as much as many, and sums that cancel out are not held
to more digits than their summands had.
"""

import math
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor

from diffray.kernels import confidence as reference
from diffray.kernels import noise, router
from diffray.kernels.confidence import Confidence

_SWAPPED = 1e-3  # share of rows, plus one row, in which near equals may change places


def largest_error(_args: Items[Any], got: Items[Tensor], expected: Items[Tensor]) -> float:
    """Return the largest error of any number; infinite if a shape or an integer differs."""
    return max(map(_error, got, expected), default=0.0) if len(got) == len(expected) else math.inf


def _error(got: Tensor, expected: Tensor) -> float:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return math.inf
    if got.numel() == 0 or torch.equal(got, expected):
        return 0.0
    if not expected.is_floating_point():
        return math.inf
    return float(_errors(got, expected).max())


def _errors(got: Tensor, expected: Tensor) -> Tensor:
    """Return the error of each number; infinite if it is not a number and should be."""
    wide = expected.to(torch.float64 if expected.dtype == torch.float32 else torch.float32)
    finite = wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    scale = finite.square().mean(-1, keepdim=True).sqrt().maximum(finite.abs())
    share = (got.to(wide.dtype) - wide).abs() / scale
    return share.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(got == expected, 0.0)


def share_of_rows_beyond(limit: float, got: Tensor, expected: Tensor) -> float:
    """Return the share of rows, or of numbers if there are no rows, with a larger error."""
    beyond = _errors(got, expected) > limit
    return float((beyond.any(-1) if beyond.dim() > 1 else beyond).float().mean())


def choice_error(args: Items[Any], got: Items[Tensor], expected: Items[Tensor]) -> float:
    """Return the error of a router's weights; infinite if it chose or listed other experts.

    In a few rows it may choose others: rounding decides between near equals, whose weights are near
    equal too. The listed pairs must be those of its own choice.
    """
    (ids_TK, weights_TK, *pairs), (expected_TK, expected_weights_TK, *_) = got, expected
    if ids_TK.shape != expected_TK.shape:
        return math.inf
    differ = int((ids_TK != expected_TK).any(1).sum())
    if differ > 1 + _SWAPPED * len(ids_TK):
        return math.inf
    listed = largest_error(args, pairs, router.list_pairs(ids_TK, len(args[1])))
    return max(listed, largest_error(args, [weights_TK], [expected_weights_TK]))


def confidence_error(args: Items[Any], got: Items[Tensor], expected: Items[Tensor]) -> float:
    """Return the error of `confidence`; ids may differ if the reference ranks them as near equals.

    So the logit and the score of the chosen id are compared with what the reference computes for
    that id, and the score also with that of the reference's choice.
    """
    hidden_RH, head_VH, start, forbidden, _, draw = args
    ours, theirs = Confidence(*got), Confidence(*expected)
    if ours.ids_R.shape != theirs.ids_R.shape or (ours.ids_R == forbidden).any():
        return math.inf
    asked_R1 = ours.ids_R.unsqueeze(1)
    known = reference.confidence(hidden_RH, head_VH, start, forbidden, asked_R1, None)
    logits_R = scores_R = known.gathered_RK.squeeze(1)
    if draw is not None:
        drawn_R1 = noise.gumbel(draw.seed_R, draw.position_R, draw.step_R, asked_R1)
        tempered_R = logits_R / draw.temperature_R + drawn_R1.squeeze(1).to(logits_R)
        scores_R = tempered_R.where(draw.temperature_R > 0, logits_R)
    return max(
        largest_error(args, (ours.logits_R, ours.scores_R), (logits_R, scores_R)),
        largest_error(args, _values(ours), _values(theirs)),
    )


def _values(found: Confidence) -> list[Tensor]:
    """Return the values that do not depend on which near equal was chosen, each as one row."""
    kept = found.scores_R, found.best_R, found.logsumexp_R, found.gathered_RK
    return [values.flatten() for values in kept]
