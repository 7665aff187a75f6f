"""The router of LLaDA-MoE and of Qwen3's sparse models, such as SDAR-MoE.

Letters: T packed tokens, H hidden size, E experts, K experts of a token.
"""

import torch
from torch import Tensor, nn

from diffray.components.layers import Parts, whole, wide
from diffray.components.weight import empty
from diffray.kernels.choose import Kernels
from diffray.kernels.router import Routing


class SoftmaxRouter(nn.Module):
    """Chooses by probability over all experts, in float32.

    If renormalised, a token's expert weights add up to 1; otherwise they are probabilities.
    """

    def __init__(
        self,
        experts: int,
        chosen: int,
        hidden: int,
        dtype: torch.dtype,
        kernels: Kernels,
        *,
        biased: bool = False,
        renormalised: bool = False,
    ) -> None:
        super().__init__()
        self.chosen, self.kernels, self.renormalised = chosen, kernels, renormalised
        self.weight_EH = empty(experts, hidden, dtype=wide(dtype))
        self.bias_E = empty(experts, dtype=wide(dtype)) if biased else None

    def forward(self, x_TH: Tensor) -> Routing:
        routing = self.kernels.softmax_router(x_TH, self.weight_EH, self.bias_E, self.chosen)
        if not self.renormalised:
            return routing
        weights_TK = routing.weights_TK
        return routing._replace(weights_TK=weights_TK / weights_TK.sum(-1, keepdim=True))

    def parts(self, prefix: str) -> Parts:
        parts = {f"{prefix}.mlp.gate.weight": whole(self.weight_EH)}
        if self.bias_E is not None:
            parts[f"{prefix}.mlp.expert_bias"] = whole(self.bias_E)
        return parts
