"""The best filling of a block's masks, or a drawn one, with which an automaton accepts the answer.

The positions of a block are treated as independent, as the model predicts them. Among all fillings
that keep the decided tokens, that the automaton allows, and that leave enough positions to end, the
best one is found, or one is drawn, exactly: a backward pass over the states computes the value of
what follows each position, and a forward pass chooses. Any part of the filling may be made final,
because the rest of it completes that part.

Letters: B sequences that share an automaton, L positions of their blocks, R rows of the head, V
this rank's vocabulary, C classes, S sets of classes, Q states, D edges of a state, E edges of all
states, N members.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.backend import rows_at_a_time
from diffray.components.grammar.automaton import Automaton

LEFT_OUT = 1e4  # subtracted from the logits of tokens that top-k or top-p drop


class Entry(NamedTuple):
    """The state in which each sequence enters its block, and the positions after it."""

    state_B: Tensor
    valid_BL: Tensor  # positions that belong to the answer
    room_B: Tensor  # positions of the answer after the block


def fill(score_BLC: Tensor, mass_BLC: Tensor | None, automaton: Automaton, entry: Entry) -> Tensor:
    """Return the class from which to take each position's token, [B, L].

    They form the filling with the best sum of scores. If scores are `mass_BLC`, the logarithms of
    the classes' probabilities, with Gumbel noise, it is drawn from the allowed fillings.
    """
    score_BLS = _of_sets(score_BLC, automaton, drawn=False)
    if mass_BLC is None:
        following = _backward(score_BLS, automaton, entry, drawn=False)
    else:
        mass_BLS = _of_sets(mass_BLC, automaton, drawn=True)
        following = _backward(mass_BLS, automaton, entry, drawn=True)
    set_BL = _forward(score_BLS, following, automaton, entry)
    member_BLC = automaton.member_SC[set_BL][..., :-1]
    return score_BLC.masked_fill(~member_BLC, -torch.inf).argmax(-1)


def _backward(
    score_BLS: Tensor, automaton: Automaton, entry: Entry, *, drawn: bool
) -> list[Tensor]:
    """Return each state's value after each position, the best or a log-sum-exp: L of [B, Q]."""
    ends_BQ = automaton.distance_Q <= entry.room_B.unsqueeze(1)
    value_BQ = torch.zeros_like(ends_BQ, dtype=score_BLS.dtype).masked_fill(~ends_BQ, -torch.inf)
    found = []
    size = len(value_BQ), *automaton.set_QD.shape
    set_E, next_E = automaton.set_QD.flatten(), automaton.next_QD.flatten()
    for at in range(score_BLS.shape[1] - 1, -1, -1):
        found.append(value_BQ)
        way_BE = score_BLS[:, at].index_select(1, set_E) + value_BQ.index_select(1, next_E)
        way_BQD = way_BE.view(size)
        before_BQ = way_BQD.logsumexp(-1) if drawn else way_BQD.amax(-1)
        value_BQ = torch.where(entry.valid_BL[:, at, None], before_BQ, value_BQ)
    return found[::-1]


def _forward(
    score_BLS: Tensor, following: list[Tensor], automaton: Automaton, entry: Entry
) -> Tensor:
    """Choose each position's set, from the state that the sets before it lead to."""
    state_B, taken = entry.state_B, []
    for at, value_BQ in enumerate(following):
        set_BD, next_BD = automaton.set_QD[state_B], automaton.next_QD[state_B]
        way_BD = score_BLS[:, at].gather(1, set_BD) + value_BQ.gather(1, next_BD)
        best_B1 = way_BD.argmax(1, keepdim=True)
        taken.append(set_BD.gather(1, best_B1).squeeze(1))
        next_B = next_BD.gather(1, best_B1).squeeze(1)
        state_B = torch.where(entry.valid_BL[:, at], next_B, state_B)
    return torch.stack(taken, 1)


def _of_sets(value_BLC: Tensor, automaton: Automaton, *, drawn: bool) -> Tensor:
    """Return the largest value of each set's classes, or their log-sum-exp; -inf if it has none."""
    set_N, class_N = automaton.member_SC[:, :-1].nonzero().unbind(1)
    size = *value_BLC.shape[:-1], len(automaton.member_SC)
    value_BLN = value_BLC[..., class_N]
    index_BLN = set_N.expand_as(value_BLN)
    best_BLS = value_BLC.new_full(size, -torch.inf).scatter_reduce(-1, index_BLN, value_BLN, "amax")
    return _log_sum(value_BLN, index_BLN, best_BLS) if drawn else best_BLS


def of_classes(value_RV: Tensor, class_V: Tensor, count: int, *, drawn: bool) -> Tensor:
    """Return the largest value of each class's tokens, or if `drawn` their log-sum-exp."""
    found = []
    for value in value_RV.split(rows_at_a_time(value_RV)):
        index = class_V.expand_as(value)
        best = value.new_full((len(value), count + 1), -torch.inf)
        best = best.scatter_reduce(1, index, value, "amax")
        found.append((_log_sum(value, index, best) if drawn else best)[:, :-1])
    return torch.cat(found)


def _log_sum(value: Tensor, index: Tensor, best: Tensor) -> Tensor:
    peak = best.nan_to_num(neginf=0.0)
    parts = peak.gather(-1, index).neg_().add_(value).exp_()
    return torch.zeros_like(best).scatter_add(-1, index, parts).log() + peak
