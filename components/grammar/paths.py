"""The best filling of a block's masks, or a drawn one, with which an automaton accepts the answer.

The positions of a block are treated as independent, as the model predicts them. Among all fillings
that keep the decided tokens, that the automaton allows, and that leave enough positions to end, the
best one is found, or one is drawn, exactly: a backward pass over the states computes the value of
what follows each position, and a forward pass chooses. Any part of the filling may be made final,
because the rest of it completes that part.

Letters: G sequences, L positions of their blocks, R rows of the head, V this rank's vocabulary, C
classes, D edges of a state; of all sequences: Q states, E edges, S sets of classes, M members.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from diffray.components.backend import rows_at_a_time
from diffray.components.grammar.automata import Automata

_COPIED: Final = 1 << 24  # classes at a time
LEFT_OUT = 1e4  # subtracted from the logits of tokens that top-k or top-p drop


class Entry(NamedTuple):
    """The state in which each sequence enters its block, and the positions after it."""

    state_G: Tensor
    valid_GL: Tensor  # positions that belong to the answer
    room_G: Tensor  # positions of the answer after the block


def fill(score_GLC: Tensor, mass_GLC: Tensor | None, automata: Automata, entry: Entry) -> Tensor:
    """Return the class from which to take each position's token, [G, L].

    They form the filling with the best sum of scores. If scores are `mass_GLC`, the logarithms of
    the classes' probabilities, with Gumbel noise, it is drawn from the allowed fillings.
    """
    score_LS = _of_sets(score_GLC, automata, drawn=False)
    if mass_GLC is None:
        following = _backward(score_LS, automata, entry, drawn=False)
    else:
        mass_LS = _of_sets(mass_GLC, automata, drawn=True)
        following = _backward(mass_LS, automata, entry, drawn=True)
    set_LG = _forward(score_LS, following, automata, entry)
    member_LGM, real_LGM = automata.members.of(set_LG)
    class_LGM = automata.class_M[member_LGM]
    score_LK = score_GLC.transpose(0, 1).flatten(1)
    value_LGM = score_LK.gather(1, class_LGM.flatten(1)).view(class_LGM.shape)
    best_LG1 = value_LGM.masked_fill(~real_LGM, -torch.inf).argmax(-1, keepdim=True)
    return (class_LGM.gather(-1, best_LG1).squeeze(-1) % automata.num_classes).T


def _backward(score_LS: Tensor, automata: Automata, entry: Entry, *, drawn: bool) -> list[Tensor]:
    """Return each state's value after each position, the best or a log-sum-exp: L of [Q]."""
    join = automata.edges.log_sum if drawn else automata.edges.largest
    ends_Q = automata.distance_Q <= entry.room_G[automata.sequence_Q]
    value_Q = torch.zeros_like(ends_Q, dtype=score_LS.dtype).masked_fill(~ends_Q, -torch.inf)
    valid_LQ = entry.valid_GL.T[:, automata.sequence_Q]
    found = []
    for score_S, valid_Q in zip(score_LS.flip(0), valid_LQ.flip(0), strict=True):
        found.append(value_Q)
        way_E = score_S.index_select(0, automata.set_E)
        way_E += value_Q.index_select(0, automata.next_E)
        value_Q = torch.where(valid_Q, join(way_E), value_Q)
    return found[::-1]


def _forward(score_LS: Tensor, following: list[Tensor], automata: Automata, entry: Entry) -> Tensor:
    """Choose each position's set, from the state that the sets before it lead to: [L, G]."""
    state_G, taken = automata.first_G + entry.state_G, []
    for score_S, value_Q, valid_G in zip(score_LS, following, entry.valid_GL.T, strict=True):
        edge_GD, real_GD = automata.edges.of(state_G)
        set_GD, next_GD = automata.set_E[edge_GD], automata.next_E[edge_GD]
        way_GD = (score_S[set_GD] + value_Q[next_GD]).masked_fill(~real_GD, -torch.inf)
        best_G1 = way_GD.argmax(1, keepdim=True)
        taken.append(set_GD.gather(1, best_G1).squeeze(1))
        state_G = torch.where(valid_G, next_GD.gather(1, best_G1).squeeze(1), state_G)
    return torch.stack(taken)


def _of_sets(value_GLC: Tensor, automata: Automata, *, drawn: bool) -> Tensor:
    """Return the largest value of each set's classes, or their log-sum-exp: [L, S]."""
    value_ML = value_GLC.transpose(1, 2).flatten(0, 1)[automata.class_M]
    join = automata.members.log_sum if drawn else automata.members.largest
    return join(value_ML).T.contiguous()


def of_classes(
    value_RV: Tensor, class_AV: Tensor, which_R: Tensor, count: int, *, drawn: bool
) -> Tensor:
    """Return the largest value of each class's tokens, or if `drawn` their log-sum-exp.

    `which_R` says which of A automata each row follows.
    """
    found = []
    for value, index in with_classes(value_RV, class_AV, which_R):
        best = value.new_full((len(value), count + 1), -torch.inf)
        best = best.scatter_reduce(1, index, value, "amax")
        found.append((_log_sum(value, index, best) if drawn else best)[:, :-1])
    return torch.cat(found)


def with_classes(
    value_RV: Tensor, class_AV: Tensor, which_R: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return a few rows at a time, and the classes of their tokens."""
    rows = rows_at_a_time(value_RV)
    if len(class_AV) == 1:  # all rows share one copy
        shared_1V = class_AV.long()
        for value in value_RV.split(rows):
            yield value, shared_1V.expand_as(value)
        return
    rows = min(rows, max(_COPIED // value_RV.shape[1], 1))
    for value, which in zip(value_RV.split(rows), which_R.split(rows), strict=True):
        yield value, class_AV[which].long()


def _log_sum(value: Tensor, index: Tensor, best: Tensor) -> Tensor:
    peak = best.nan_to_num(neginf=0.0)
    parts = peak.gather(-1, index).neg_().add_(value).exp_()
    return torch.zeros_like(best).scatter_add(-1, index, parts).log() + peak
