"""Tokens without confidence: decoders see the probabilities that are left without them."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffray.components.block import Proposal
from diffray.components.propose import Chosen
from diffray.components.sequence import Sequence
from diffray.components.transforms import Bias, LogitBias
from diffray.workers.features.feature import Feature
from diffray.workers.features.logit_transforms import where

if TYPE_CHECKING:
    from diffray.workers.head_plan import HeadPlan


class ZeroConfidence(Feature):
    """The `zero_confidence_token_ids` of requests."""

    fused = True

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return bool(sequence.params.diffusion.zero_confidence_token_ids)

    def plan_head(self, head: "HeadPlan") -> None:
        found = []
        for block in head.blocks_of(self):
            ids = block.sequence.params.diffusion.zero_confidence_token_ids
            if bias := Bias.forbid(ids).plan(where(block)):
                found.append(bias)
        self.bias = LogitBias.join(found, head.device) if found else None

    def needs_logits(self, head: "HeadPlan") -> bool:
        return self.bias is not None

    def inspect(self, chosen: Chosen, proposal: Proposal) -> Proposal:
        if self.bias is None:
            return proposal
        return replace(proposal, confidence_BL=confidence_without(chosen, self.bias))


def confidence_without(chosen: Chosen, bias: LogitBias) -> Tensor:
    """Return the confidences that are left without some tokens, whose logits become -inf."""
    logits = chosen.logits
    bias.add_to(logits)
    others_R = torch.logaddexp(logits.logsumexp(), chosen.mask_logit_R)
    own_R = logits.gather(chosen.ids_R.unsqueeze(1)).squeeze(1)
    left_R = (own_R - others_R).exp().nan_to_num(0.0)  # where no others are allowed
    return chosen.confidence(left_R)
