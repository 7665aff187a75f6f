"""Chooses each token's experts and their weights.

Letters: T packed tokens, E experts, K experts of a token, G groups of M experts each, J of which
are chosen.
"""

import torch
from torch import Tensor


def softmax_topk(
    logits_TE: Tensor, bias_E: Tensor | None, num_chosen: int
) -> tuple[Tensor, Tensor]:
    """Return ids and weights [T, K]: the largest probabilities, not renormalised.

    A bias affects both the choice and the weights.
    """
    scores_TE = logits_TE.softmax(dim=-1)
    if bias_E is not None:
        scores_TE = scores_TE + bias_E
    weights_TK, ids_TK = scores_TE.topk(num_chosen, dim=-1)
    return ids_TK, weights_TK


def grouped_sigmoid_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    num_chosen: int,
    *,
    num_groups: int,
    groups_chosen: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return ids and weights [T, K], chosen inside the best groups of consecutive experts.

    The bias affects only the choice. A group's score is the sum of its two best experts.
    """
    scores_TE = logits_TE.sigmoid()
    choice_TE = scores_TE + bias_E
    if groups_chosen < num_groups:
        choice_TGM = choice_TE.unflatten(-1, (num_groups, -1))
        group_TG = choice_TGM.topk(2, dim=-1).values.sum(dim=-1)
        kept_TJ = group_TG.topk(groups_chosen, dim=-1).indices
        dropped_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, kept_TJ, False)
        choice_TE = choice_TGM.masked_fill(dropped_TG.unsqueeze(-1), float("-inf")).flatten(1)
    ids_TK = choice_TE.topk(num_chosen, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if num_chosen > 1:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * scale
