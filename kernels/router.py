"""Chooses each token's experts and their weights.

Letters: T packed tokens, H hidden size, E experts, K experts of a token, G groups of M experts
each, J of which are chosen, S token-expert pairs (T * K).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class Pairs(NamedTuple):
    """Each expert's token-expert pairs, one expert after the other, in token order."""

    starts_E: Tensor  # where each expert's pairs start, then where the last one's end
    order_S: Tensor


class Routing(NamedTuple):
    """Each token's experts; a router may also list the experts' pairs."""

    ids_TK: Tensor
    weights_TK: Tensor
    starts_E: Tensor | None = None
    order_S: Tensor | None = None

    @property
    def pairs(self) -> Pairs | None:
        if self.starts_E is None or self.order_S is None:
            return None
        return Pairs(self.starts_E, self.order_S)

    def of(self, start: int, stop: int) -> "Routing":
        """Return the routing of some experts: ids relative to the first, and only their pairs."""
        ids_TK = self.ids_TK - start if start else self.ids_TK
        if self.starts_E is None:
            return Routing(ids_TK, self.weights_TK)
        return Routing(ids_TK, self.weights_TK, self.starts_E[start : stop + 1], self.order_S)


def softmax_router(
    x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, num_chosen: int
) -> Routing:
    """Choose by `softmax_topk` of the product, in the dtype of the router's weights."""
    logits_TE = linear(x_TH.to(weight_EH.dtype), weight_EH)
    return Routing(*softmax_topk(logits_TE, bias_E, num_chosen))


def grouped_sigmoid_router(
    x_TH: Tensor,
    weight_EH: Tensor,
    bias_E: Tensor,
    num_chosen: int,
    *,
    num_groups: int,
    groups_chosen: int,
    scale: float,
) -> Routing:
    """Choose by `grouped_sigmoid_topk` of the product, in the dtype of the router's weights."""
    chosen = grouped_sigmoid_topk(
        linear(x_TH.to(weight_EH.dtype), weight_EH),
        bias_E,
        num_chosen,
        num_groups=num_groups,
        groups_chosen=groups_chosen,
        scale=scale,
    )
    return Routing(*chosen)


def list_pairs(ids_TK: Tensor, num_experts: int) -> Pairs:
    """List each expert's pairs in order; ids outside [0, E) are left out."""
    here_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    ids_S, order_S = ids_TK.where(here_TK, num_experts).flatten().sort(stable=True)
    experts_E = torch.arange(num_experts + 1, device=ids_S.device)
    return Pairs(torch.searchsorted(ids_S, experts_E, out_int32=True), order_S.int())


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
