"""Muon: momentum whose matrices are made orthogonal before they are applied.

After K. Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon/). On these small models it
reaches a loss in about half of AdamW's steps. Experts, stacked as [E, rows, columns], are E
matrices; gate and up, stored as one matrix, are two.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Four odd polynomials that together bring singular values from 0.01 to 1 to within 3 % of 1, fitted
# by gradient descent on the largest error.
STEPS = ((4.6693, -9.5679, 4.9544), (4.0826, -6.2464, 2.5441), (2.785, -3.5113, 1.3248),
         (2.5995, -3.0407, 1.4489))  # fmt: skip


def orthogonal(update_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return about U V^T for each `update` = U S V^T, by fifth-order Newton-Schulz iterations."""
    x = update_NRC.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in STEPS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result: Tensor = x.mT if tall else x
    return result.to(update_NRC.dtype)


class Muon(Optimizer):
    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        dtype: torch.dtype,
        lr: float,
        momentum: float = 0.95,
        decay: float = 0.01,
    ) -> None:
        """Set up groups; a parameter of a group holds `stacked` matrices on top of each other.

        `dtype` is that of the products in the iteration.
        """
        self.dtype = dtype
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay, "stacked": 1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(state["momentum"], group["momentum"])
                rows, columns = parameter.shape[-2:]
                rows //= group["stacked"]
                update = orthogonal(update.view(-1, rows, columns), self.dtype).view_as(parameter)
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
